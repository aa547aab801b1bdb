"""transformers' Trainer with mirrored models: adapters of peft, and several GPUs."""

import copy

import pytest
import torch

import mirror
from mirror.errors import StrategyError
from tests.oracle import assert_same

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def train(tmp_path):
    """Gives ``train(model, gpus=1)``: the losses; ``gpus`` is what the Trainer sees."""
    lengths = (8, 3, 5, 8, 2, 7, 4, 8, 6, 3, 5)
    draws = torch.Generator().manual_seed(0)
    pairs = []
    for length in lengths:
        tokens = torch.randint(1, 32, (8,), generator=draws)
        labels = torch.where(torch.arange(8) < length, tokens, -100)
        pairs.append({"input_ids": tokens, "labels": labels})

    def trained(model, gpus=1, evaluated_only=False):
        arguments = transformers.TrainingArguments(
            tmp_path,
            per_device_train_batch_size=4,  # of 11: the last one is uneven
            max_steps=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            adam_epsilon=1e-6,
        )
        assert arguments.n_gpu <= 1
        arguments._n_gpu = gpus
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=pairs)
        if not evaluated_only:
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, trainer.evaluate(pairs[:5])["eval_loss"]]

    return trained


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


@pytest.mark.parametrize("evaluated_only", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_it_sees_several_gpus_the_error_names_a_remedy_that_works(
    evaluated_only, train, make_strategy
):
    plain = llama()
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    with pytest.raises(StrategyError, match=r"Trainer does so .* arguments._n_gpu = 1"):
        train(model, gpus=3, evaluated_only=evaluated_only)
    assert_same(train(model), train(plain))
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "order", ["adapter first", pytest.param("mirrored first", marks=pytest.mark.slow)]
)
def test_lora_trains_and_merges_as_on_one_device(order, train, make_strategy, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    base = llama()
    start = copy.deepcopy(base)
    torch.manual_seed(1)
    plain = peft.get_peft_model(copy.deepcopy(base), config)
    strategy = make_strategy(3)
    if order == "adapter first":
        model = strategy.mirror(copy.deepcopy(plain))
    else:
        strategy.mirror(base)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config)
    expected, losses = train(plain), train(model)
    assert mirror.is_mirrored(model)
    assert_same(losses, expected)
    assert_same(model.state_dict(), plain.state_dict())
    tokens = torch.randint(1, 32, (5, 6))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
    merged = model.merge_and_unload()
    for other in (again, merged):
        assert_same(other(tokens).logits, plain(tokens).logits)
