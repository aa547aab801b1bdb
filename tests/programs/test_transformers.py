"""Models and the Trainer of transformers train mirrored models as plain ones."""

import copy

import pytest
import torch

import mirror
from mirror.errors import StrategyError
from mirror.replica.modules.module_owner import interceptor_of
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once

transformers = pytest.importorskip("transformers")

# The library announces its own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [6, 5, 7, 2, 4]


# The same sizes under the names of each family, and no dropout.
SIZE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZE, num_key_value_heads=1, attention_dropout=0.0)
    )


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(**SIZE, **NO_DROPOUT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def vit():
    sizes = {name: SIZE[name] for name in SIZE if name.startswith(("hidden", "inter", "num"))}
    config = transformers.ViTConfig(
        **sizes, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


def t5():
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


ALL = [llama, gpt2, bert, vit, t5]


def batches(build):
    made = []
    for size in SIZES:
        tokens = torch.randint(32, (size, 8))
        if build is vit:
            images, labels = torch.randn(size, 3, 8, 8), torch.randint(3, (size,))
            made.append({"pixel_values": images, "labels": labels})
        elif build is t5:
            made.append({"input_ids": tokens, "labels": torch.randint(1, 32, (size, 6))})
        elif build is bert:
            mask = torch.ones(size, 8, dtype=torch.long)
            mask[::2, 6:] = 0
            labels = torch.randint(3, (size,))
            made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
        else:
            made.append({"input_ids": tokens, "labels": tokens})
    return made


def loss_of(model, batch):
    return model(**batch).loss


def pair(build, strategy):
    plain = build()
    return plain, strategy.mirror(copy.deepcopy(plain))


@each_once(build=ALL, n=[2, 3], way=[1, 2, 3])
def test_a_transformer_trains_as_on_one_device(build, n, way, make_strategy):
    strategy = make_strategy(n)
    plain, model = pair(build, strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (plain, model)]
    data = batches(build)

    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    expected = train_loop(plain, optimizers[0], data, loss_of, clip=clip)
    actual = train(way, strategy, model, optimizers[1], data, loss_of, clip=clip)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizers[1], plain, optimizers[0])


@pytest.mark.parametrize("build", ALL)
def test_outputs_are_model_outputs_joined(build, make_strategy):
    plain, model = pair(build, make_strategy(2))
    for m in (plain, model):
        m.eval()
    for batch in batches(build):
        options = {} if build in (bert, vit) else {"use_cache": False}
        expected = plain(**batch, output_hidden_states=True, **options)
        actual = model(**batch, output_hidden_states=True, **options)
        assert type(actual) is type(expected)
        assert list(actual.keys()) == list(expected.keys())
        assert_same(actual.loss, expected.loss, "loss")
        assert_same(actual.logits, expected.logits, "logits")
        names = [name for name in expected if name.endswith("hidden_states")]
        assert names
        for name in names:
            assert_same(actual[name], expected[name], name)


@pytest.mark.parametrize("build", [llama, gpt2, t5])
def test_a_model_with_a_cache_can_be_called(build, make_strategy):
    plain, model = pair(build, make_strategy(2))
    batch = batches(build)[0]
    with torch.no_grad():
        assert_same(model(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("build", [llama, gpt2, t5])
def test_generate_in_run_gives_the_tokens_of_one_device(build, make_strategy):
    strategy = make_strategy(2)
    plain, model = pair(build, strategy)
    tokens = torch.randint(1, 32, (5, 4))

    def generate(model, tokens):
        return model.eval().generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
        )

    (batch,) = strategy.distribute_dataset([tokens])
    actual = strategy.gather(strategy.run(generate, args=(model, batch)))
    assert torch.equal(actual, generate(plain, tokens))


SEARCHES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "beam": {"do_sample": False, "num_beams": 2},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


def mistral():
    config = transformers.MistralConfig(**SIZE, num_key_value_heads=1, sliding_window=6)
    return transformers.MistralForCausalLM(config)


def bert_decoder():
    return transformers.BertLMHeadModel(transformers.BertConfig(**SIZE, is_decoder=True))


@each_once(build=[llama, gpt2, t5, mistral, bert_decoder], search=SEARCHES)
def test_generate_outside_run_gives_the_tokens_of_one_device(build, search, make_strategy):
    # All replicas had one cache between them: wrong tokens, or an error for uneven parts.
    plain, model = pair(build, make_strategy(3))
    for size in (2, 7):  # smaller than the number of replicas, and uneven
        tokens = torch.randint(1, 32, (size, 4))
        mask = torch.ones_like(tokens)
        if build is not t5:
            mask[0, :2] = 0
        made = []
        for m in (plain, model):
            torch.manual_seed(1)
            options = SEARCHES[search]
            made.append(
                m.eval().generate(
                    tokens, attention_mask=mask, max_new_tokens=5, pad_token_id=0, **options
                )
            )
        assert torch.equal(made[1], made[0])


@each_once(build=[llama, mistral], kind=["DynamicCache", "StaticCache", None])
def test_a_cache_goes_from_call_to_call(build, kind, make_strategy):
    plain, model = pair(build, make_strategy(2))
    tokens = torch.randint(1, 32, (5, 9))
    results = []
    for m in (plain, model):
        m.eval()
        cache = None
        if kind is not None:
            options = {"max_cache_len": 16} if kind == "StaticCache" else {}
            cache = getattr(transformers, kind)(config=m.config, **options)
        first = m(tokens[:, :5], past_key_values=cache, use_cache=True)
        if cache is not None:
            assert first.past_key_values is cache
        second = m(tokens[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        results.append((first.logits, second.logits, second.past_key_values.layers[0].keys))
    assert_same(results[1], results[0])


@pytest.fixture
def train_by_trainer(tmp_path):
    """Gives ``train_by_trainer(model, gpus=1)``: the losses; the Trainer sees so many GPUs."""
    pytest.importorskip("accelerate")
    pairs = []
    for length in (8, 3, 5, 8, 2, 7, 4, 8, 6, 3, 5):
        tokens = torch.randint(1, 32, (8,))
        labels = torch.where(torch.arange(8) < length, tokens, -100)
        pairs.append({"input_ids": tokens, "labels": labels})

    def train(model, gpus=1, evaluated_only=False, **options):
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
            **options,
        )
        assert arguments.n_gpu <= 1
        arguments._n_gpu = gpus
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=pairs)
        if not evaluated_only:
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, trainer.evaluate(pairs[:5])["eval_loss"]]

    return train


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_trainer_trains_a_language_model_as_on_one_device(
    options, make_strategy, train_by_trainer
):
    # It passes the number of target tokens: the loss was 1/N of one device's.
    plain, model = pair(llama, make_strategy(3))
    assert_same(train_by_trainer(model, **options), train_by_trainer(plain, **options))
    assert_same(model.state_dict(), plain.state_dict())


def test_the_trainer_replays_a_compiled_model(make_strategy, train_by_trainer):
    found = []
    for compiles in (False, True):
        strategy = make_strategy(1)
        torch.manual_seed(0)
        _, model = pair(llama, strategy)
        if compiles:
            strategy.compile(model, fallback="error")
        losses = train_by_trainer(model)
        found.append([torch.tensor(losses), *model.state_dict().values()])
    assert interceptor_of(model).compiled.num_traces > 0
    assert all(map(torch.equal, *found))


def test_a_compiled_model_with_ignored_labels_replays_its_losses(make_strategy):
    found = []
    for compiles in (False, True):
        strategy = make_strategy(2)
        torch.manual_seed(0)
        _, model = pair(gpt2, strategy)
        if compiles:
            strategy.compile(model, fallback="error")
        for size in (4, 4, 5, 5):
            tokens = torch.randint(1, 32, (size, 8))
            lengths = torch.arange(1, size + 1)[:, None]
            labels = torch.where(torch.arange(8) <= lengths, tokens, -100)
            output = model(input_ids=tokens, labels=labels)
            output.loss.backward()
            found.append(
                [output.loss, output.logits, *[p.grad.clone() for p in model.parameters()]]
            )
    assert interceptor_of(model).compiled.num_traces == 2
    assert "_Replayed" in type(output.logits.grad_fn.next_functions[0][0]).__name__
    for one, other in zip(found[:4], found[4:], strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("evaluated_only", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_it_sees_several_gpus_the_error_names_a_remedy_that_works(
    evaluated_only, train_by_trainer, make_strategy
):
    plain, model = pair(llama, make_strategy(3))
    with pytest.raises(StrategyError, match=r"Trainer does so .* arguments._n_gpu = 1"):
        train_by_trainer(model, gpus=3, evaluated_only=evaluated_only)
    assert_same(train_by_trainer(model), train_by_trainer(plain))
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    "order", ["adapter first", pytest.param("mirrored first", marks=pytest.mark.slow)]
)
def test_lora_trains_and_merges_as_on_one_device(order, train_by_trainer, make_strategy, tmp_path):
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
    expected, losses = train_by_trainer(plain), train_by_trainer(model)
    assert mirror.is_mirrored(model)
    assert_same(losses, expected)
    assert_same(model.state_dict(), plain.state_dict())
    tokens = torch.randint(1, 32, (5, 6))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
    merged = model.merge_and_unload()
    for other in (again, merged):
        assert_same(other(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("build", ALL)
def test_save_pretrained_writes_the_plain_weights(build, make_strategy, tmp_path):
    plain, model = pair(build, make_strategy(2))
    model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert_same(again.state_dict(), plain.state_dict(), tolerance=0)
    assert type(model) is type(plain)
