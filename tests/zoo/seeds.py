"""Seeds with which three greedy texts of a checkpoint wander: twenty tokens, no early EOS, clear gaps. Others: 0."""

from __future__ import annotations

_NAMES: dict[int, str] = {
    1: "causal/apertus causal/aria_text causal/axk2 causal/bamba causal/beam causal/bigbird_pegasus causal/biogpt "
    "causal/ctrl causal/dbrx causal/deepseek_v3 causal/deepseek_v32 causal/deepseek_v4 causal/dots3_note "
    "causal/ernie4_5_moe causal/flex_olmo causal/gemma4_unified causal/gemma4_unified_text causal/glm4_moe_lite "
    "causal/gpt_neox_japanese causal/gptj causal/granitemoe causal/hrm_text causal/hunyuan_v1_dense causal/hy_v3 "
    "causal/inkling2_text causal/kimi_linear causal/lfm3 causal/mamba causal/mellum causal/mimo_v2_flash "
    "causal/minicpm3 causal/ministral causal/mistral causal/mixtral causal/moshi causal/olmo causal/olmo2 "
    "causal/olmo3 causal/olmoe causal/pegasus causal/phi3+longrope causal/phimoe causal/qwen3 causal/qwen3_moe "
    "causal/roberta-prelayernorm causal/rwkv causal/xlm causal/xlnet causal/zamba2 seq2seq/bart seq2seq/led+long "
    "seq2seq/mbart seq2seq/mvp seq2seq/umt5",
    2: "causal/bart causal/blenderbot-small causal/cohere2_moe causal/doge causal/dots1 causal/emu3 "
    "causal/exaone_moe causal/gemma4_text+experts causal/git causal/glm causal/glm_moe_dsa causal/gpt_neox "
    "causal/granitemoe_swa causal/granitemoeshared causal/kolibri1 causal/mbart causal/mvp causal/olmo_hybrid "
    "causal/opt causal/prophetnet causal/qwen3_next causal/qwen4_exp causal/roc_bert causal/trocr "
    "causal/xlm-roberta-xl causal/zamba seq2seq/blenderbot seq2seq/mt5 seq2seq/prophetnet seq2seq/qwen2_audio "
    "seq2seq/t5+gated seq2seq/t5gemma2",
    3: "causal/cwm causal/falcon causal/gemma causal/got_ocr2 causal/mllama causal/nanochat causal/phi3 "
    "causal/recurrent_gemma causal/roformer seq2seq/fsmt seq2seq/m2m_100 seq2seq/nemo_speechlm seq2seq/t5gemma",
    4: "causal/bert causal/ernie causal/granitemoehybrid causal/jamba causal/modernbert-decoder causal/mpt "
    "causal/phi causal/youtu",
    5: "causal/afmoe causal/cpmant causal/gemma3n_text causal/internlm3 causal/iquestcoder causal/llama "
    "causal/llama+dynamic causal/megatron-bert causal/mistral+full causal/qwen4_exp_text seq2seq/marian "
    "seq2seq/pegasus",
    6: "causal/camembert causal/data2vec-text causal/marian causal/roberta causal/xlm-roberta seq2seq/plbart",
    7: "causal/falcon+alibi causal/opt+post",
    8: "causal/xmod seq2seq/led",
    9: "causal/plbart",
    10: "seq2seq/longt5 seq2seq/t5",
}
SEEDS: dict[str, int] = {name: seed for seed, names in _NAMES.items() for name in names.split()}
