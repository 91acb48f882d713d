"""The window in the executor's draft loop: the stand-in drives, the embedded runtime judges."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracle import Oracle
from tiny_model import random_prompts
from vendor_stub import common

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import register, resources

WINDOW, SINK = 16, 4
FAMILIES = ("Qwen3NextForCausalLM", "NemotronHForCausalLM")


def requests(lengths: list[int], tokens: int) -> list[common.Request]:
    prompts = random_prompts(lengths, 97, seed=5)
    return [
        common.Request(100 + index, prompt, tokens + 7 * (index % 3))
        for index, prompt in enumerate(prompts)
    ]


def compare_all_steps(executor: Any, oracle: Oracle, work: list[common.Request]) -> int:
    """Runs until all requests are done; every draft must be the oracle's. Counts comparisons."""
    compared = 0
    for batch, result in executor.run(work):
        expected = oracle.expected(batch, result)
        for index, one in enumerate(batch):
            if one.request_id in expected:
                compared += 1
                assert result["next_draft_tokens"][index].tolist() == expected[one.request_id]
        oracle.leave({one.request_id for one in work if len(one.output) < one.max_tokens})
    return compared


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("draft_len", [1, 3, 6])
def test_drafts_are_the_embedded_runtimes_whatever_is_accepted(
    vendor: Any, configure: Any, architecture: str, draft_len: int
) -> None:
    """Batches that change size, chunked prompts, padding rows, rings that wrap many times."""
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model(architecture, max_draft_len=draft_len)
    executor = vendor.executor(model, batch_size=4, chunk=vendor.chunk)
    luck = random.Random(draft_len)
    executor.hits = lambda one: luck.randrange(draft_len + 1)
    oracle = Oracle(executor, WINDOW, SINK, lanes=8)
    with torch.inference_mode():
        compared = compare_all_steps(executor, oracle, requests([50, 3, 21, 70, 1, 33, 18], 24))
    assert compared > 40
    assert model.draft_model.mtp_layers[0].head is not None


def test_rotary_positions_on_three_axes_are_no_hindrance(vendor: Any, configure: Any) -> None:
    """Multimodal models have them for text as well; lengths on the device count the tokens."""
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model("Qwen3_5MoeForConditionalGeneration")
    executor = vendor.executor(model, chunk=vendor.chunk, mrope=True)
    luck = random.Random(2)
    executor.hits = lambda one: luck.randrange(4)
    oracle = Oracle(executor, WINDOW, SINK, lanes=8)
    with torch.inference_mode():
        assert compare_all_steps(executor, oracle, requests([50, 3, 21, 33], 16)) > 16


def test_three_axes_without_lengths_are_refused(vendor: Any, configure: Any) -> None:
    configure(window=WINDOW, n_sink=SINK)
    register()
    executor = vendor.executor(vendor.model(), mrope=True)
    metadata = executor.model.draft_model.mtp_layers[0]
    call = {
        "attn_metadata": common.SimpleNamespace(num_seqs=1, seq_lens=[2], num_contexts=1),
        "position_ids": torch.zeros(3, 1, 2, dtype=torch.int32),
        "input_ids": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ConfigError, match="has no kv_lens_cuda"):
        resources.find_owner(executor.model)._before(metadata, (), call)
    call["position_ids"] = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ConfigError, match="one per row"):
        resources.find_owner(executor.model)._before(
            metadata, (), call | {"attn_metadata": executor.attention}
        )


def test_what_an_earlier_owner_left_in_a_ring_is_never_read(vendor: Any, configure: Any) -> None:
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model()
    executor = vendor.executor(model, batch_size=2, chunk=vendor.chunk)
    executor.hits = lambda one: one.steps % 4
    rings = resources.find_owner(model).rings
    release = rings.table.release

    def release_and_poison(request_id: int) -> None:
        lane = rings.table.acquire(request_id)
        release(request_id)
        rings.ring_k[lane], rings.ring_v[lane] = float("nan"), float("nan")

    rings.table.release = release_and_poison
    oracle = Oracle(executor, WINDOW, SINK, lanes=8)
    with torch.inference_mode():
        compare_all_steps(executor, oracle, requests([12, 40, 5, 30, 22, 9], 16))
    assert rings.ring_k.isnan().any()  # it was really poisoned


def test_a_window_that_holds_everything_is_the_native_draft(vendor: Any, configure: Any) -> None:
    prompts = random_prompts([50, 9, 33], 97)
    native_executor = vendor.executor(vendor.model())
    native_executor.hits = lambda one: one.steps % 4
    native = vendor.generate(native_executor, prompts, 24)
    configure(window=400, n_sink=4)
    register()
    executor = vendor.executor(vendor.model())
    executor.hits = lambda one: one.steps % 4
    assert vendor.generate(executor, prompts, 24).tokens == native.tokens


@pytest.mark.parametrize("mode", ["ring", "pages"])
def test_output_is_that_of_stock_mtp(vendor: Any, configure: Any, mode: str) -> None:
    prompts = random_prompts([50, 9, 33, 64], 97)
    native = vendor.generate(vendor.executor(vendor.model()), prompts, 20)
    configure(window=WINDOW, n_sink=SINK, mode=mode)
    register()
    windowed = vendor.generate(vendor.executor(vendor.model()), prompts, 20)
    assert windowed.tokens == native.tokens


def test_rings_go_back_when_requests_end(vendor: Any, configure: Any) -> None:
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model()
    executor = vendor.executor(model, batch_size=2)
    table = resources.find_owner(model).rings.table
    vendor.generate(executor, random_prompts([9] * 9, 97), 6)
    assert table.taken_away == 0
    assert not [one for one in range(10, 19) if one in table]


def test_a_manager_of_the_vendors_own_keeps_working(vendor: Any, configure: Any) -> None:
    """Relaxed acceptance has a manager already: rings follow its calls."""
    configure(window=WINDOW, n_sink=SINK)
    register()
    freed: list[int] = []

    class Relaxed(common.BaseResourceManager):
        slot_manager = type("Slots", (), {"get_slot": staticmethod(lambda request: 0)})

        def get_max_resource_count(self) -> int:
            return 8

        def get_needed_resource_to_completion(self, request: Any) -> int:
            return 0

        def free_resources(self, request: Any) -> None:
            freed.append(request.request_id)

    from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor

    model = vendor.model()
    engine = common.engine_of(model, 2)
    engine.relaxed_acceptance_manager = Relaxed()
    executor = create_py_executor(engine)
    assert executor.manager is engine.relaxed_acceptance_manager
    vendor.generate(executor, random_prompts([9, 12], 97), 6)
    assert sorted(freed) == [10, 11]
    table = resources.find_owner(model).rings.table
    assert 10 not in table
    assert 11 not in table


def test_a_prefix_hit_starts_cold_and_leaks_nothing(vendor: Any, configure: Any) -> None:
    """Rows before the hit were never written in this ring: they count as empty ones."""
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model()
    executor = vendor.executor(model, batch_size=2)
    rings = resources.find_owner(model).rings
    rings.ring_k.fill_(float("nan"))
    rings.ring_v.fill_(float("nan"))
    warm = common.Request(5, random_prompts([40], 97)[0], 8, fed=24)
    for position, token in enumerate(warm.prompt[:24]):
        model.model._tokens.setdefault(5, {})[position] = token
    for _ in executor.run([warm]):
        pass
    cold = vendor.generate(vendor.executor(vendor.model()), [warm.prompt], 8)
    assert warm.output == cold.tokens[0]


REFUSED = {
    "vanilla MTP": ("Qwen3NextForCausalLM", {"use_mtp_vanilla": True}, "MTP_EAGLE_ONE_MODEL"),
    "a dynamic tree": ("Qwen3NextForCausalLM", {"use_dynamic_tree": True}, "use_dynamic_tree"),
    "rotation in the kernel": ("Glm4MoeForCausalLM", {}, "rope_fusion"),
    "latent attention": ("DeepseekV3ForCausalLM", {}, "MLA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_window_does_not_cover_is_refused(vendor: Any, configure: Any, case: str) -> None:
    architecture, spec, words = REFUSED[case]
    configure(window=WINDOW)
    register()
    with pytest.raises(ConfigError, match=words) as refusal:
        vendor.model(architecture, **spec)
    assert "TRTLLM_WMTP_MODE=off" in str(refusal.value)


@pytest.mark.parametrize("case", REFUSED)
def test_or_runs_with_stock_mtp_where_the_settings_say_so(
    vendor: Any, configure: Any, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    architecture, spec, words = REFUSED[case]
    configure(window=WINDOW, unsupported="native")
    register()
    model = vendor.model(architecture, **spec)
    assert resources.find_owner(model) is None
    assert "stock MTP" in caplog.text
    assert words in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_beam_width": 2}, "a ring belongs to one sequence"),
        (
            {"cache_transceiver_config": common.SimpleNamespace(backend="NIXL")},
            "leaves its draft ring behind",
        ),
        ({"prefill_cuda_graph_backend": "breakable"}, "a replayed prefill would leave out"),
    ],
)
def test_serving_that_moves_or_splits_sequences_is_refused(
    vendor: Any, configure: Any, options: dict[str, Any], words: str
) -> None:
    configure(window=WINDOW)
    register()
    with pytest.raises(ConfigError, match=words):
        vendor.executor(vendor.model(), **options)


@pytest.mark.parametrize("name", ["pp_size", "cp_size"])
def test_other_parallelism_than_tensors_is_refused(vendor: Any, configure: Any, name: str) -> None:
    from tllm_wmtp.trtllm import settings, worker

    model = vendor.model()
    setattr(model.model_config.mapping, name, 2)
    with pytest.raises(ConfigError, match=f"{name} 2"):
        worker.attach(model, settings.Settings())


def test_a_draft_length_that_is_not_given_is_refused(vendor: Any, configure: Any) -> None:
    configure(window=WINDOW)
    register()
    with pytest.raises(ConfigError, match="give max_draft_len"):
        vendor.model(max_draft_len=None)


def test_a_draft_of_another_checkpoint_is_refused(vendor: Any, configure: Any) -> None:
    from tllm_wmtp.trtllm import settings, worker

    model = vendor.model()
    model.draft_model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="draft model Linear"):
        worker.attach(model, settings.Settings())


@pytest.mark.parametrize("mode", ["ring", "pages"])
def test_a_draft_layer_that_is_called_otherwise_is_refused(
    vendor: Any, configure: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from tllm_wmtp.trtllm import compat, settings, worker

    model = vendor.model()
    layer = model.draft_model.mtp_layers[0]
    owner = worker.attach(model, settings.Settings(mode, WINDOW, SINK))
    with pytest.raises(ConfigError, match="with input_ids: hooks read attn_metadata by its name"):
        owner._before(layer, (), {"input_ids": torch.zeros(1)})
    monkeypatch.setattr(type(layer), "forward", lambda self, ids, positions: ids)
    with pytest.raises(ConfigError, match=f"it lacks {', '.join(compat.LAYER_CALL)}"):
        worker.attach(vendor.model(), settings.Settings(mode, WINDOW, SINK))


def test_asking_for_resources_again_keeps_the_rings(vendor: Any, configure: Any) -> None:
    """Memory is estimated with one executor and served with the next; graphs hold addresses."""
    configure(window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model()
    vendor.executor(model)
    address = resources.find_owner(model).rings.ring_k.data_ptr()
    vendor.executor(model)
    assert resources.find_owner(model).rings.ring_k.data_ptr() == address


def test_what_else_is_asked_of_the_backend_the_stock_one_answers(
    vendor: Any, configure: Any
) -> None:
    configure(window=WINDOW, n_sink=SINK)
    register()
    layer = vendor.model().draft_model.mtp_layers[0]
    assert layer.self_attn.attn.layer_idx == 1
    assert not hasattr(layer.self_attn.attn, "no_such_thing")


def test_no_speculation_is_left_alone(vendor: Any, configure: Any) -> None:
    from tllm_wmtp.trtllm import settings, worker

    model = vendor.model()
    model.model_config.spec_config = None
    assert worker.attach(model, settings.Settings()) is None


def test_mode_off_registers_nothing(vendor: Any, configure: Any) -> None:
    configure(mode="off")
    assert register() == []


def test_registered_classes_can_be_found_by_name_in_a_worker(vendor: Any, configure: Any) -> None:
    """Workers are sent classes by reference, or the name of a module to import."""
    import pickle

    configure(window=WINDOW)
    register()
    register()
    from tensorrt_llm._torch.models import modeling_utils

    cls = modeling_utils.MODEL_CLASS_MAPPING["Qwen3NextForCausalLM"]
    assert cls.__name__ == "WindowedQwen3NextForCausalLM"
    assert pickle.loads(pickle.dumps(cls)) is cls
    if vendor.layout == "late":
        modules = modeling_utils.export_external_model_modules()
        assert modules["Qwen3NextForCausalLM"] == "tllm_wmtp.trtllm.plugin"


@pytest.mark.parametrize("layout", ["late"], indirect=True)
def test_a_worker_that_is_told_module_names_windows_the_text_model_of_a_multimodal_one(
    vendor: Any, configure: Any
) -> None:
    """It looks the wrapper up, which is the vendor's own: nothing else brings the plug-in in."""
    import importlib

    configure(window=WINDOW, n_sink=SINK)
    utils = "tensorrt_llm._torch.models.modeling_utils"
    register()
    told = importlib.import_module(utils).export_external_model_modules()
    assert told["Qwen3_5MoeForConditionalGeneration"] == "tllm_wmtp.trtllm.plugin"
    vendor.restart()
    importlib.import_module(utils).register_external_model_modules(told)
    model = vendor.model("Qwen3_5MoeForConditionalGeneration")
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    assert type(model.llm).__name__ == "WindowedQwen3_5MoeForCausalLM"
    assert resources.find_owner(model) is resources.find_owner(model.llm) is not None
