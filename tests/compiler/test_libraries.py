"""Models of transformers: steps compared with the plain loop, modules with uncompiled calls."""

from typing import Any

import pytest
import torch

import mirror
from mirror.replica.modules.module_owner import interceptor_of
from tests.compiler.training import Beside
from tests.pairs import quick_of

transformers = pytest.importorskip("transformers")

TOKENS = 40
USUAL = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# By model: the class, its config's class, and options. The loss is the model's own.
LANGUAGE = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", USUAL),
    # Makes its loss where it is used.
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", USUAL | NO_DROPOUT),
    # Adds in place to what lies in another order.
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
        | {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
}


def language_step(model, optimizer):
    def step(ids):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_of(LANGUAGE, [*LANGUAGE.keys() - {"llama"}]))
def test_a_language_model_is_that_of_the_plain_loop(name):
    model, config, options = LANGUAGE[name]

    def make():
        return getattr(transformers, model)(getattr(transformers, config)(**options)).train()

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randint(0, TOKENS, (n, 8), generator=generator),) for n in (6, 6, 4)]
    beside = Beside(2, make, make_step=language_step)
    beside.train(data, rtol=1e-4, atol=1e-5)
    beside.strategy.close()


GROUPED = {"num_hidden_layers": 1, "num_key_value_heads": 1}
# By model: as above, and the implementation of attention. With dropout, where models have it.
MODULES: dict[str, tuple[Any, ...]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", USUAL | GROUPED, "sdpa"),
    "bert": ("BertForMaskedLM", "BertConfig", USUAL, "sdpa"),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "eager",
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", USUAL | GROUPED, "sdpa"),
}


@pytest.mark.parametrize("name", quick_of(MODULES, ["llama", "bert", "gpt2"]))
def test_a_compiled_model_has_the_bits_of_an_uncompiled_one(name):
    """The unchanged loop, whose outputs have caches, with a mask where the model takes one."""
    model, config, options, attention = MODULES[name]
    n = 1 if name == "llama" else 2
    ids = torch.randint(0, TOKENS, (4, 6), generator=torch.Generator().manual_seed(0))
    # The losses that several replicas return are joined by their graphs, which no program has.
    batch = {"input_ids": ids, "labels": ids if n == 1 else None}
    if attention == "eager":
        batch["attention_mask"] = torch.ones(4, 6).index_fill(1, torch.tensor(5), 0)

    def train(compiles):
        torch.manual_seed(0)
        found = []
        strategy = mirror.MirroredStrategy(["cpu"] * n)
        with strategy.scope():
            made = getattr(transformers, config)(**options, attn_implementation=attention)
            net = getattr(transformers, model)(made).train()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            if compiles:
                strategy.compile(net)  # generate() passes a cache, and runs uncompiled
            for _ in range(3):
                optimizer.zero_grad()
                out = net(**batch)
                loss = out.logits.square().mean() if out.loss is None else out.loss
                loss.backward()
                optimizer.step()
                found += [loss.detach(), out.logits.detach()]
                if name == "gpt2":
                    found.append(net.eval().generate(ids[:, :2], max_new_tokens=2, min_length=4))
                    net.train()
            if compiles:
                assert interceptor_of(net).compiled.num_traces == 1
        strategy.close()
        return found

    assert all(map(torch.equal, train(False), train(True)))
