"""Tokenizers and untrained models of the built-in checkpoints."""

from __future__ import annotations

import random

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from builtin_data import numbers

# Neither model converses; these let a chat be tried offline. A story goes on from all messages: an answer follows its
# turn as it was written, and a blank stands before other messages that have none. A number is the last message.
STORIES_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set text = message['content'] or '' %}"
    "{% if not (loop.first or message['role'] == 'assistant' or text[:1].isspace()"
    " or (loop.previtem['content'] or '')[-1:].isspace()) %}{{ ' ' }}{% endif %}{{ text }}{% endfor %}"
)
NUMBERS_CHAT = "{{ messages[-1]['content'] or '' }}{{ eos_token }}"


def stories_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A $B",
        special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=STORIES_CHAT,
    )


def stories_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        dtype="float32",
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def numbers_tokenizer() -> PreTrainedTokenizerFast:
    """T5 conventions (<pad> 0, </s> 1, <unk> 2), one token per digit, pieces of words otherwise."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        # Small on purpose: most words take two or three pieces.
        vocab_size=152,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    generator = random.Random(0)
    words = [numbers.to_words(generator.randrange(numbers.LIMIT)) for _ in range(2000)]
    digits = [str(number) for number in range(100)]
    tokenizer.train_from_iterator([*words, *map(numbers.to_words, range(100)), *digits], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>",
        pair="$A </s> $B </s>",
        special_tokens=[("</s>", tokenizer.token_to_id("</s>"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        chat_template=NUMBERS_CHAT,
    )


def numbers_model(tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    ids = {
        "decoder_start_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=320,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = T5ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ids)
    return model
