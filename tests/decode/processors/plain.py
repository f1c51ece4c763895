"""A plain loop around our processors: a full forward for each token, no cache, one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.processors.trace import run_checked
from genctl.params import Generation
from tests import tiny

PROMPT = [5, 17, 44, 17, 90, 44, 17, 8]
NEW = 10


def material(
    prompt: list[int] | None = None, arch: str = "gpt2", eos: tuple[int, ...] = (tiny.EOS,), **knobs: Any
) -> ProcessorContext:
    """The context from which the processors of one tiny lane are built; `knobs` may also name its fields."""
    fields = {name: knobs.pop(name) for name in list(knobs) if name in ProcessorContext.__dataclass_fields__}
    ids = torch.tensor([PROMPT if prompt is None else prompt])
    decoder = 1 if arch in tiny.SEQ2SEQ else ids.shape[1]
    return ProcessorContext(
        generation=Generation(**{"top_k": 0, **knobs}), prompt_len=decoder, max_length=decoder + NEW, eos=eos,
        encoder_ids=ids, is_encoder_decoder=arch in tiny.SEQ2SEQ, **{"vocab_size": tiny.VOCABULARY, **fields},
    )  # fmt: skip


def write(model: Any, made: ProcessorContext, seed: int) -> list[int]:
    """The new tokens of one row, EOS included; sampled with torch's own generator, as transformers does."""
    processors = build(made)
    torch.manual_seed(seed)
    assert made.encoder_ids is not None
    source = made.encoder_ids
    history = torch.tensor([[model.config.decoder_start_token_id]]) if made.is_encoder_decoder else source
    with torch.no_grad():
        read = model.get_encoder()(source) if made.is_encoder_decoder else None
        for _ in range(NEW):
            logits = (
                model(encoder_outputs=read, decoder_input_ids=history) if made.is_encoder_decoder else model(history)
            )
            scores = run_checked(processors, history, logits.logits[:, -1].float())
            token = (
                torch.multinomial(scores.softmax(-1), 1)
                if made.generation.do_sample
                else scores.argmax(-1, keepdim=True)
            )
            history = torch.cat([history, token], 1)
            if int(token) in made.eos:
                break
    return history[0, made.prompt_len :].tolist()


def generated(model: Any, made: ProcessorContext, seed: int, **options: Any) -> list[int]:
    """The tokens that `generate` writes with `options`."""
    torch.manual_seed(seed)
    source = made.encoder_ids
    options = {"top_k": 0, "use_cache": False, **options}
    with torch.no_grad():
        whole: Tensor = model.generate(
            source, attention_mask=torch.ones_like(source), max_new_tokens=NEW, pad_token_id=tiny.PAD, **options
        )
    return whole[0, made.prompt_len :].tolist()
