"""Language models of transformers that train through a head: as with their own loss, or refused."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manymax
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.integrations.huggingface import LogProbabilities, attach, detach

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("default")]

CLASSES = 97
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "cohere": ("CohereForCausalLM", "CohereConfig", LLAMA),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**LLAMA, "logits_scaling": 8.0}),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
SCORING = {"gemma2": (1.0, 2.0), "cohere": (16.0, None), "granite": (8.0, None)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers = pytest.importorskip("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model, config, settings = MODELS[name]
    return made(model, config, **{**settings, **more})


def made(model: str, config: str, **settings: Any) -> Any:
    """A model of transformers, which is imported when a test runs and not when tests are collected."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(vocab_size=CLASSES, **settings))


def softmax_head(**keywords: Any) -> Any:
    return manymax.LinearSoftmaxLoss(None, CLASSES, **keywords)


def batch(number: int) -> dict[str, Tensor]:
    """Sequences that go on by 3 from token to token, with labels of which some do not count."""
    random = torch.Generator().manual_seed(number)
    ids = (torch.randint(CLASSES, (4, 1), generator=random) + 3 * torch.arange(12)) % CLASSES
    labels = torch.where(torch.rand(ids.shape, generator=random) < 0.3, -100, ids)
    return {"input_ids": ids, "labels": labels}


def losses(model: Any, steps: int = 20) -> list[float]:
    """The losses of some steps of AdamW, with the same dropout in each call."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_softmax_head_trains_as_the_model_itself(name: str) -> None:
    own = build(name)
    model, head = copy.deepcopy(own), softmax_head()
    assert attach(model, head) is model
    assert (head.temperature, head.softcap) == SCORING.get(name, (1.0, None))
    assert model(**batch(0)).logits is None
    assert losses(model) == pytest.approx(losses(own), rel=1e-4)
    for mine, other in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-3)


@pytest.mark.parametrize("head", [manymax.LinearEntmaxLoss, manymax.LinearSparsemaxLoss])
@pytest.mark.parametrize("name", ["gemma2", "bert"])
def test_a_sparse_head_trains_and_generates(name: str, head: Any) -> None:
    model = attach(build(name), head(None, CLASSES))
    found = losses(model, steps=40)
    assert found[-1] < 0.9 * found[0]
    scores = model(input_ids=batch(0)["input_ids"]).logits
    log_probs = LogProbabilities(model.manymax_head)(None, scores)
    assert (log_probs == -torch.inf).any()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4, 12))
    if name == "gemma2":
        text = model.generate(
            batch(0)["input_ids"],
            do_sample=True,
            max_new_tokens=3,
            logits_processor=[LogProbabilities(model.manymax_head)],
        )
        assert text.shape[1] > 12


def test_parameters_and_buffers_of_a_head_are_those_of_the_model() -> None:
    head = manymax.LinearEntmaxLoss(None, CLASSES, learnable=True, weight=torch.ones(CLASSES))
    model = attach(build("llama"), head)
    model(**batch(0)).loss.backward()
    named = dict(model.named_parameters())
    learned = [name for name in named if name.startswith("manymax_head.")]
    assert len(learned) == 1
    assert named[learned[0]].grad != 0
    assert "manymax_head.weight" in model.state_dict()
    twin = copy.deepcopy(model)
    assert twin.manymax_head is not model.manymax_head
    with torch.no_grad():
        twin.get_output_embeddings().weight.zero_()  # the copy has its own vectors, and uses them
    assert twin(**batch(0)).loss != model(**batch(0)).loss
    assert len(list(detach(model).parameters())) == len(named) - 1
    torch.testing.assert_close(model(**batch(0)).loss, build("llama")(**batch(0)).loss)


def test_outputs_take_every_form_that_the_model_has() -> None:
    own, model = build("llama").eval(), attach(build("llama"), softmax_head(), eval_logits=True).eval()
    given = batch(0)
    mine, other = model(**given), own(**given)
    torch.testing.assert_close(mine.logits, other.logits)
    torch.testing.assert_close(mine.to_tuple()[0], other.loss)
    torch.testing.assert_close(model(**given, return_dict=False)[:2], own(**given, return_dict=False)[:2])
    torch.testing.assert_close(model(given["input_ids"]).logits, other.logits)
    shifted = nn.functional.pad(given["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    for model_or_own in (model, own):
        loss = model_or_own(**given, shift_labels=shifted, num_items_in_batch=torch.tensor(50)).loss
        torch.testing.assert_close(loss, other.loss * (shifted != -100).sum() / 50)


class Sequences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[0] for name, value in batch(100 + index).items()}


def trainer(model: Any, folder: Path, **arguments: Any) -> Any:
    transformers = importlib.import_module("transformers")
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=5,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    return transformers.Trainer(model, settings, train_dataset=Sequences(), eval_dataset=Sequences())


@pytest.mark.parametrize("name", ["llama, tied", "gemma2", "bert"])
@pytest.mark.parametrize(
    "arguments",
    [{"gradient_accumulation_steps": 3, "gradient_checkpointing": True}, {"bf16": True}],
    ids=["fp32", "bf16"],
)
def test_trainer(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    half = "bf16" in arguments
    if name == "bert" and not half:
        # Its own loss does not look at `num_items_in_batch`, with which Trainer then counts on: it is three times what
        # it should be. One batch of three times the size has the right one.
        own = trainer(build(name), tmp_path / "own", gradient_checkpointing=True)
        own.args.per_device_train_batch_size, own._train_batch_size = 6, 6
    else:
        own = trainer(build(name), tmp_path / "own", **arguments)
    mine = trainer(attach(build(name), softmax_head()), tmp_path / "mine", save_steps=5, **arguments)
    for run in (own, mine):
        run.train()
    logs = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (mine, own)]
    assert logs[0] == pytest.approx(logs[1], rel=5e-3 if half else 1e-4)
    assert len(logs[0]) == 5
    evaluated = [run.evaluate()["eval_loss"] for run in (mine, own)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=5e-3 if half else 1e-4)
    saved = type(mine.model).from_pretrained(tmp_path / "mine" / "checkpoint-5")
    ids = batch(0)["input_ids"]
    torch.testing.assert_close(saved.state_dict(), mine.model.state_dict())
    if name != "bert" and not half:
        texts = [model.generate(ids, max_new_tokens=3, do_sample=False).tolist() for model in (mine.model, saved)]
        assert texts[0] == texts[1]
    again = trainer(attach(build(name), softmax_head()), tmp_path / "mine", **arguments)
    again.args.max_steps = 6
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    # accelerate takes its own wrappers off, and not the head.
    unwrapped = mine.accelerator.unwrap_model(mine.model, keep_fp32_wrapper=False)
    assert unwrapped(**batch(0)).logits is None


def test_a_trainer_that_takes_the_labels_away_is_told(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = trainer(attach(build("llama"), softmax_head()), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ArgumentError, match="label_smoothing_factor"):
        run.train()


def test_a_model_in_half_precision() -> None:
    own = build("gemma2").to(torch.bfloat16)
    model = attach(copy.deepcopy(own), softmax_head())
    given = batch(0)
    assert model(**given).loss.dtype == torch.float32
    torch.testing.assert_close(model(**given).loss, own(**given).loss.float(), rtol=1e-2, atol=0)


class Adapted(nn.Linear):
    """An output layer with more than its weight and bias."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.sum(-1, keepdim=True) * torch.arange(CLASSES) / 1000


class Tilted(nn.Module):
    """What some architecture may do to its logits, after the output layer."""

    def __init__(self, model: Any, change: Any) -> None:
        super().__init__()
        self.inner, self.change, self.config = model, change, model.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.inner(input_ids=input_ids, **kwargs)
        outputs.logits = self.change(outputs.logits)
        if labels is not None:
            outputs["loss"] = self.inner.loss_function(outputs.logits, labels, vocab_size=CLASSES)
        return outputs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda logits: logits * 1.01, "to its logits"),
        (lambda logits: 30 * torch.tanh(logits / 30), "to its logits"),
        (lambda logits: logits + torch.arange(logits.shape[-1]) / 100, "to its logits"),
        (lambda logits: logits.index_fill(-1, torch.tensor([3]), -torch.inf), "to its logits"),
        (lambda logits: logits.clamp(max=50), "to its logits"),
        (lambda logits: logits[..., :90], "a logit for each row"),
        (nn.Dropout(0.1), "cross entropy of its labels"),
    ],
    ids=["factor", "cap", "bias", "mask", "clamp", "slice", "dropout"],
)
def test_what_no_configuration_says_is_refused(change: Any, words: str) -> None:
    model = Tilted(build("llama"), change)
    with pytest.raises(ArgumentError, match=words):
        attach(model, softmax_head())
    assert not hasattr(model, "manymax_head")
    assert "forward" not in vars(model)


def test_a_model_that_does_nothing_else_is_not_refused() -> None:
    attach(Tilted(build("llama"), nn.Identity()), softmax_head())


def test_other_losses_and_other_layers_are_refused() -> None:
    experts = {**LLAMA, "num_local_experts": 4, "output_router_logits": True}
    mixtral = made("MixtralForCausalLM", "MixtralConfig", **experts)
    with pytest.raises(ArgumentError, match="routing of experts"):
        attach(mixtral, softmax_head())
    t5 = made("T5ForConditionalGeneration", "T5Config", d_model=32, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(ArgumentError, match="encoder with a decoder"):
        attach(t5, softmax_head())
    hooked = build("llama")
    hooked.lm_head.register_forward_hook(lambda layer, given, found: found * 1.1)
    with pytest.raises(ArgumentError, match="does something to its logits"):
        attach(hooked, softmax_head())
    adapted = build("llama")
    adapted.lm_head.__class__ = Adapted
    with pytest.raises(ArgumentError, match="adapters"):
        attach(adapted, softmax_head())
    with pytest.raises(ArgumentTypeError, match="language model"):
        attach(nn.Linear(2, CLASSES), softmax_head())


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (lambda: manymax.LinearSoftmaxLoss(32, CLASSES), "in_features=None"),
        (lambda: manymax.LinearSoftmaxLoss(None, CLASSES + 1), "as many classes"),
        (lambda: softmax_head(normalize=True), "normalize"),
        (lambda: softmax_head(temperature=0.5), "temperature"),
        (lambda: softmax_head(softcap=30.0), "softcap"),
        (lambda: softmax_head(reduction="sum"), "reduction"),
        (lambda: softmax_head(stats=("nll",)), "stats"),
        (lambda: nn.CrossEntropyLoss(), "linear head"),
    ],
)
def test_a_head_with_a_loss_of_other_logits_is_refused(head: Any, words: str) -> None:
    model = build("gemma2")
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        attach(model, head())
    assert "forward" not in vars(model)


def test_a_second_head_and_a_resized_vocabulary_are_refused() -> None:
    model = attach(build("llama"), softmax_head())
    with pytest.raises(ArgumentError, match="detach"):
        attach(model, softmax_head())
    model.resize_token_embeddings(CLASSES + 3)
    with pytest.raises(ArgumentError, match="resize"):
        model(**batch(0))
