"""The embedded target: one engine per cell, side by side and in turns.

Cells that differ in arm, depth, window, sinks or KV type answer the same prompts. Their engines
share one set of weights; they prefill one after the other, whoever was first being last in the next
round, and then the one that has made the fewest tokens steps next. A disturbance of the machine
therefore meets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp import machine
from tllm_wmtp.bench import inputs
from tllm_wmtp.bench.step import step_bytes
from tllm_wmtp.bench.sweep.cells import Cell, engines_key, in_groups, prompts_key
from tllm_wmtp.bench.sweep.protocol import Answer, Iteration
from tllm_wmtp.bench.sweep.target import Advance, Floor, Measured, Result
from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.errors import CheckpointError, ConfigError
from tllm_wmtp.executor.draft import ring_of
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.models.cache import available_bytes
from tllm_wmtp.models.spec import ModelConfig
from tllm_wmtp.sampling import SamplingParams

#: Share of the free memory that engines side by side may take.
MEMORY_SHARE = 0.5
#: Engines in one race: each step of another one drives its keys out of the processor's caches.
MOST_SIDE_BY_SIDE = 4
WARM_UP_IDS = [index % 7 for index in range(32)]


class EmbeddedTarget:
    """Args:
    directories: checkpoint of each model that a cell names.
    """

    def __init__(self, directories: Mapping[str, Path]):
        self._directories = directories
        self._loaded: tuple[tuple[str, str, str], LoadedModel] | None = None

    def prepare(self, cells: Sequence[Cell]) -> None:
        for model, mine in _by_model(cells):
            config = read_config(self._directories[model])
            if CheckpointDirectory(self._directories[model]).tokenizer() is None:
                raise CheckpointError(
                    f"model {model!r}",
                    "it has no tokenizer.json, and prompts are made of text",
                    "add the file to the directory",
                )
            for cell in mine:
                cell.engine_config.resolved(config.max_position_embeddings)
                if cell.device.startswith("cuda") and not torch.cuda.is_available():
                    raise ConfigError(
                        f"device {cell.device!r}", "there is no such device here", "use 'cpu'"
                    )

    def run(self, cells: Sequence[Cell], advance: Advance) -> Generator[Result, None, None]:
        for model, mine in _by_model(cells):
            config = read_config(self._directories[model])
            for stage in in_groups(mine, engines_key):
                device = torch.device(stage[0].device)
                bandwidth = machine.read_bandwidth() if device.type == "cpu" else None
                for heat in heats(stage, config, int(available_bytes(device) * MEMORY_SHARE)):
                    yield from self._run_heat(heat, bandwidth, advance)

    def _run_heat(
        self, cells: Sequence[Cell], bandwidth: float | None, advance: Advance
    ) -> Generator[Result, None, None]:
        """Cells whose engines are in memory together."""
        try:
            loaded = self._load(cells[0])
        except Exception as error:
            yield from ((cell, error) for cell in cells)
            return
        engines: dict[str, Engine] = {}
        for group in in_groups(cells, prompts_key):
            try:
                prompts = make_prompts(group[0], loaded.tokenizer)
            except Exception as error:
                yield from ((cell, error) for cell in group)
                continue
            contestants = [Contestant(cell, loaded, engines) for cell in group]
            size = group[0].batch
            for wave in range(group[0].repeats):
                turn = wave % len(contestants)  # nobody always goes first
                order = contestants[turn:] + contestants[:turn]
                race(order, prompts[wave * size : (wave + 1) * size], wave, advance)
            for contestant in contestants:
                yield contestant.cell, contestant.result(prompts, bandwidth)
                if contestant.error is not None:
                    engines.pop(engine_name(contestant.cell), None)

    def _load(self, cell: Cell) -> LoadedModel:
        name = (cell.model, cell.dtype, cell.device)
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # two models are never in memory together
            path, dtype = self._directories[cell.model], getattr(torch, cell.dtype)
            self._loaded = (name, load_model(path, dtype, cell.device, with_head=True))
        return self._loaded[1]


class Contestant:
    """One cell's engine, and what it has measured. An error ends its part, and nobody else's."""

    def __init__(self, cell: Cell, loaded: LoadedModel, engines: dict[str, Engine]):
        self.cell = cell
        self.error: Exception | None = None
        self.iterations: list[Iteration] = []
        self.answers: list[Answer] = []
        self._loaded = loaded
        self._requests: list[Request] = []
        self._guarded(lambda: self._take_engine(engines))

    @property
    def running(self) -> bool:
        return self.error is None and any(not request.finished for request in self._requests)

    @property
    def tokens(self) -> int:
        """Made in this wave."""
        return sum(len(request.output_ids) for request in self._requests)

    def begin(self, prompts: Sequence[inputs.Prompt], wave: int) -> None:
        """Prefills a batch of prompts; requests that are ready decode meanwhile."""
        first = wave * self.cell.batch
        params = [
            self.cell.sampling.params(self.cell.seed + first + index)
            for index in range(len(prompts))
        ]
        self._guarded(lambda: self._submit([prompt.ids for prompt in prompts], params))
        while self.error is None and any(
            request.phase in (Phase.WAITING, Phase.PREFILL) for request in self._requests
        ):
            self.step()

    def step(self) -> None:
        self._guarded(self._step)

    def end(self) -> None:
        """Keeps the answers of a wave."""
        self._guarded(lambda: self.answers.extend(map(self._answer, self._requests)))
        self._requests = []

    def result(
        self, prompts: Sequence[inputs.Prompt], bandwidth: float | None
    ) -> Measured | Exception:
        if self.error is not None:
            return self.error
        cell, kv_dtype = self.cell, getattr(torch, self._engine.config.kv_cache.dtype)
        length = sum(answer.prompt_tokens for answer in self.answers) // len(self.answers)
        read = step_bytes(self._loaded, cell.speculation, length, kv_dtype, cell.batch)
        missing = {}
        if cell.arm == "dense":
            missing = dict.fromkeys(("ctx_ms", "fwd_ms"), "the dense arm has no draft forward")
        elif cell.depth == 2:
            missing["fwd_ms"] = "at depth 2 the only draft forward is the first"
        if bandwidth is None:
            names = ("floor_ms", "fraction_of_floor", "read_bandwidth_gb_per_s")
            missing |= dict.fromkeys(names, "the read bandwidth is measured on a CPU only")
        floor = Floor(read["draft"] + read["verify"], bandwidth)
        return Measured(prompts, self.answers, self.iterations, floor, device_of(cell), missing)

    def _take_engine(self, engines: dict[str, Engine]) -> None:
        """The engine of that name, or a new one, which answers a short prompt first: the first
        measured one does not pay for first calls."""
        name = engine_name(self.cell)
        if name not in engines:
            self._engine = Engine(self._loaded, self.cell.engine_config)
            self._submit([WARM_UP_IDS], [SamplingParams(max_tokens=8, ignore_eos=True)])
            while any(not request.finished for request in self._requests):
                self._step()
            self._requests, self.iterations = [], []
            engines[name] = self._engine
        self._engine = engines[name]

    def _submit(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        self._requests = [
            self._engine.submit(ids, each) for ids, each in zip(prompts, params, strict=True)
        ]

    def _step(self) -> None:
        before = self._engine.last_step
        self._engine.step()
        step = self._engine.last_step
        for request in self._requests:
            if request.error is not None:
                raise request.error
        if step is None or step is before:
            return
        tokens = [len(gained) for gained in step.verdict.tokens]
        drafts = step.draft_len > 0
        self.iterations.append(
            Iteration(
                seconds=step.step_s,
                requests=len(tokens),
                tokens=sum(tokens),
                draft_s=step.draft_s,
                verify_s=step.verify_s,
                ctx_s=step.extend_s if drafts else None,
                fwd_s=(step.draft_s - step.extend_s) / (step.draft_len - 1)
                if step.draft_len > 1
                else None,
            )
        )

    def _answer(self, request: Request) -> Answer:
        metrics = request.metrics
        if metrics.preemptions:
            raise ConfigError(
                f"{metrics.preemptions} preemptions of a request",
                "a request that was prefilled twice measures nothing",
                "lower batches or contexts",
            )
        tokenizer = self._loaded.tokenizer
        return Answer(
            prompt_tokens=metrics.prompt_tokens,
            output_tokens=len(request.output_ids),
            steps=metrics.steps,
            step_tokens=sum(metrics.accepted) + metrics.steps,
            ttft_s=metrics.ttft_s,
            token_ids=tuple(request.output_ids),
            text=None if tokenizer is None else tokenizer.decode(request.output_ids),
            histogram=tuple(metrics.accepted_histogram),
            draft_trials=tuple(metrics.draft_trials),
            draft_kv_bytes=metrics.draft_kv_bytes,
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            work()
        except Exception as error:
            self.error = error
            self._requests = []


def race(
    contestants: Sequence[Contestant],
    prompts: Sequence[inputs.Prompt],
    wave: int,
    advance: Advance,
) -> None:
    """One batch of prompts in every engine: prefills one after the other, then steps in turns."""
    for contestant in contestants:
        contestant.begin(prompts, wave)
        advance(contestant.cell.prefill_cost)
    while running := [each for each in contestants if each.running]:
        min(running, key=lambda each: each.tokens).step()
    for contestant in contestants:
        contestant.end()
        advance(contestant.cell.decode_cost)


def make_prompts(cell: Cell, tokenizer: Any) -> list[inputs.Prompt]:
    """The prompts of a cell's requests, the same for all arms."""
    asked = cell.input
    return inputs.prompts(
        asked.task,
        tokenizer,
        cell.context,
        cell.requests,
        cell.seed,
        lexicon=asked.lexicon,
        difficulty=asked.difficulty,
        path=asked.path,
        **asked.options,
    )


def engine_name(cell: Cell) -> str:
    """Equal for cells that one engine serves."""
    return f"{cell.arm} {cell.depth} {cell.window} {cell.n_sink} {cell.kv_dtype}"


def heats(cells: Sequence[Cell], config: ModelConfig, budget: int) -> list[list[Cell]]:
    """Cells in groups that are run side by side: of one depth and KV type (the dense arm joins the
    next ones), and few enough to fit into ``budget`` bytes together; one that does not, alone."""
    order = sorted(cells, key=lambda cell: (cell.kv_dtype, cell.depth))
    found: list[list[Cell]] = []
    room, places, kind = 0, 0, ("", 0)
    for same in in_groups(order, engine_name):
        first, needed = same[0], engine_bytes(same[0], config)
        new = (first.kv_dtype, first.depth)
        joins = kind == new or (kind[0] == new[0] and kind[1] == 1)
        if not joins or needed > room or not places:
            found.append([])
            room, places = budget, MOST_SIDE_BY_SIDE
        found[-1] += same
        room, places, kind = room - needed, places - 1, new
    return found


def engine_bytes(cell: Cell, config: ModelConfig) -> int:
    """Bytes of an engine's caches, recurrent states left out."""
    limits = cell.engine_config.resolved(config.max_position_embeddings)
    kv_dtype, caches = getattr(torch, limits.kv_cache.dtype), config.caches
    total = (limits.kv_cache.max_tokens or 0) * caches.kv_bytes_per_token(kv_dtype)
    if limits.speculation is not None:
        slots = ring_of(limits.speculation).capacity
        total += cell.batch * slots * caches.draft.bytes_per_token(kv_dtype)
    return total


def device_of(cell: Cell) -> dict[str, Any]:
    """What differs from :func:`tllm_wmtp.machine.describe` on a GPU."""
    if cell.device == "cpu":
        return {}
    return {"device": cell.device, "processor": torch.cuda.get_device_name(cell.device)}


def _by_model(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    return [(group[0].model, group) for group in in_groups(cells, lambda cell: cell.model)]
