"""The shipped demonstration checkpoints are ordinary Hugging Face directories."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tllm_wmtp.demo import CHECKPOINT, CHECKPOINT_MAMBA2
from tllm_wmtp.demo.language import prompt
from tllm_wmtp.demo.tokenizer import build_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[CHECKPOINT, CHECKPOINT_MAMBA2], ids=lambda p: p.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def loaded(checkpoint: Path):
    """The target in ``transformers``, and what its loading found and missed."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), report


@pytest.mark.parametrize("kind", ["logs", "sentences", "lists"])
def test_transformers_loads_the_target_and_gives_the_same_logits(checkpoint, loaded, kind):
    from tllm_wmtp.checkpoint.loader import load_model
    from tllm_wmtp.models.causal import CausalStates

    model = load_model(checkpoint, torch.float32, "cpu", True)
    ids = torch.tensor([prompt(kind, 300, seed=20_001).ids])
    with torch.no_grad():
        expected = loaded[0](ids, use_cache=False).logits
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        states = CausalStates(model.config.caches.recurrent.conv_kernel)
        actual = model.target.logits(model.target(ids, positions, states))
    assert torch.allclose(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_only_the_head_is_unknown_to_transformers(checkpoint, loaded):
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert not [name for name in report["unexpected_keys"] if not name.startswith("mtp.")]
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    head = [name for name in sizes if name.startswith("mtp.")]
    assert len(head) > 10
    held = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    assert sum(sizes.values()) - sum(sizes[name] for name in head) == sum(held.values())


def test_it_stays_small(checkpoint):
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert size <= 8 * 2**20


def test_its_tokenizer_is_the_languages(checkpoint):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json")
    )
    document = prompt("logs", 200, seed=20_002)
    assert tokenizer(document.text)["input_ids"] == list(document.ids)
    assert json.loads(build_tokenizer().to_str()) == json.loads(
        (checkpoint / "tokenizer.json").read_text()
    )
