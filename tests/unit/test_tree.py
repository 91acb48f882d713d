"""Tree bookkeeping against walks from row to row and hand-worked trees."""

from __future__ import annotations

import pytest
import torch

from tllm_wmtp import tree
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.tree import TreeShape

SHAPES = [TreeShape(1, 2), TreeShape(1, 7), TreeShape(2, 3), TreeShape(4, 7), TreeShape(11, 8)]


def random_parents(shape: TreeShape, batch: int, seed: int = 0) -> torch.Tensor:
    """Every row follows a random row of the level before."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(batch, shape.rows, dtype=torch.int64)
    for level in range(2, shape.depth):
        above, rows = shape.level(level - 1), shape.level(level)
        parents[:, rows] = torch.randint(
            above.start, above.stop, (batch, shape.width), generator=generator
        )
    return parents


def walk(parents: list[int], row: int) -> list[int]:
    """Rows from the root to ``row``, by following parents."""
    path = [row]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_levels_number_the_steps_from_the_root(shape: TreeShape) -> None:
    parents = random_parents(shape, 1)[0].tolist()
    levels = shape.levels().tolist()
    assert levels == [len(walk(parents, row)) - 1 for row in range(shape.rows)]
    by_level = [levels[shape.level(number)] for number in range(shape.depth)]
    assert by_level == [[0]] + [[number] * shape.width for number in range(1, shape.depth)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ancestors_and_their_words_are_the_rows_of_the_walk(shape: TreeShape) -> None:
    parents = random_parents(shape, 3)
    related = tree.ancestors(tree.steps_up(shape, parents))
    words = tree.ancestor_words(related)
    assert words.dtype == torch.int32
    assert words.shape == (3 * shape.rows, -(-shape.rows // 32))
    for b in range(3):
        for row in range(shape.rows):
            path = walk(parents[b].tolist(), row)
            assert related[b, row].nonzero().flatten().tolist() == path
            number = 0
            for i, word in enumerate(words[b * shape.rows + row].tolist()):
                number |= (word % 2**32) << (32 * i)
            assert number == sum(1 << i for i in path)


def test_words_of_a_launch_that_appends_some_levels() -> None:
    shape = TreeShape(2, 4)
    parents = torch.tensor([[0, 0, 0, 1, 1, 4, 3]])
    related = tree.ancestors(tree.steps_up(shape, parents))
    # Levels 1 and 2 appended without the root, level 2 asked: rows 1..4 are bits 0..3.
    words = tree.ancestor_words(related[:, shape.level(2), 1:5])
    assert words.tolist() == [[0b0101], [0b1001]]


def test_the_words_of_a_hand_worked_tree() -> None:
    shape = TreeShape(2, 4)
    parents = torch.tensor([[0, 0, 0, 1, 1, 4, 3]])
    words = tree.ancestor_words(tree.ancestors(tree.steps_up(shape, parents)))
    assert words.flatten().tolist() == [
        0b0000001,
        0b0000011,
        0b0000101,
        0b0001011,
        0b0010011,
        0b0110011,
        0b1001011,
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_a_convolution_follows_the_path_into_the_history(shape: TreeShape, kernel: int) -> None:
    parents = random_parents(shape, 2, seed=kernel)
    steps = tree.steps_up(shape, parents)
    index = tree.convolution_index(steps, shape.levels(), kernel)
    history = list(range(kernel - 1))
    for b in range(2):
        for row in range(shape.rows):
            inputs = history + [kernel - 1 + r for r in walk(parents[b].tolist(), row)]
            assert index[b, row].tolist() == inputs[-kernel:]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_path_to_every_row(shape: TreeShape) -> None:
    parents = random_parents(shape, 2)
    steps = tree.steps_up(shape, parents)
    for row in range(shape.rows):
        leaf = torch.tensor([row, shape.rows - 1 - row])
        rows, counts = tree.path_to(steps, shape.levels(), leaf)
        assert rows.shape == (2, shape.depth)
        for b in range(2):
            path = walk(parents[b].tolist(), int(leaf[b]))
            assert rows[b, : int(counts[b])].tolist() == path
            assert set(rows[b, int(counts[b]) :].tolist()) <= {int(leaf[b])}


def test_children_are_the_rows_that_follow() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 1, 4, 3], [0, 0, 0, 2, 1, 3, 4]])
    assert tree.children(parents) == [
        [[1, 2], [3, 4], [], [6], [5], [], []],
        [[1, 2], [4], [3], [5], [6], [], []],
    ]


def test_a_chain_is_a_tree_of_width_one() -> None:
    shape = TreeShape(1, 6)
    parents = torch.tensor([[0, 0, 1, 2, 3, 4]])
    related = tree.ancestors(tree.steps_up(shape, parents))
    assert torch.equal(related[0], torch.ones(6, 6, dtype=torch.bool).tril())
    assert shape.levels().tolist() == list(range(6))


@pytest.mark.parametrize(
    ("width", "depth", "message"),
    [(0, 3, "tree width 0: a level.*pass 1"), (2, 1, "tree depth 1: a step.*raise depth")],
)
def test_a_shape_without_rows_is_refused(width: int, depth: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TreeShape(width, depth)


def test_parents_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parents is torch\.int32 \(1, 4\): must be int64 \[B, 5"):
        tree.steps_up(TreeShape(2, 3), torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="level 3: must lie in"):
        TreeShape(2, 3).level(3)
