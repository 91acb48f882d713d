"""The shipped demonstration checkpoint is an ordinary Hugging Face directory."""

import json

import pytest
import torch
from safetensors import safe_open

from tllm_wmtp.demo import CHECKPOINT
from tllm_wmtp.demo.language import prompt
from tllm_wmtp.demo.tokenizer import build_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def reference():
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("kind", ["logs", "sentences", "lists"])
def test_transformers_loads_the_target_and_gives_the_same_logits(reference, kind):
    from tllm_wmtp.checkpoint.loader import load_model
    from tllm_wmtp.models.causal import CausalStates

    model = load_model(CHECKPOINT, torch.float32, "cpu", True)
    ids = torch.tensor([prompt(kind, 300, seed=20_001).ids])
    with torch.no_grad():
        expected = reference(ids).logits
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        states = CausalStates(model.config.linear_conv_kernel_dim)
        actual = model.target.logits(model.target(ids, positions, states))
    assert torch.allclose(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_only_the_head_is_unknown_to_transformers(reference):
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        names = set(file.keys())
    expected = {name for name in reference.state_dict() if name != "lm_head.weight"}
    assert {name for name in names if not name.startswith("mtp.")} == expected
    assert sum(name.startswith("mtp.") for name in names) > 10


def test_it_stays_small():
    size = sum(file.stat().st_size for file in CHECKPOINT.iterdir())
    assert size <= 8 * 2**20


def test_its_tokenizer_is_the_languages():
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(CHECKPOINT / "tokenizer.json")
    )
    document = prompt("logs", 200, seed=20_002)
    assert tokenizer(document.text)["input_ids"] == list(document.ids)
    assert json.loads(build_tokenizer().to_str()) == json.loads(
        (CHECKPOINT / "tokenizer.json").read_text()
    )
