"""Parameters that lie one after another are one array to what treats every value alike."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.parameter_runs import ParameterRuns, parameter_runs
from retrograd_hookspecs import Parameter, TrainingError


def made(name: str, value: np.ndarray, grad: np.ndarray) -> Parameter:
    return Parameter(name=name, value=value, grad=grad, weight=value)


def placed(places: list[tuple[int, tuple[int, ...]]], size: int = 64) -> list[Parameter]:
    """Parameters at the given places of common buffers."""
    values, grads = np.arange(size, dtype=np.float32), np.zeros(size, np.float32)
    return [
        made(
            f"p{first}",
            values[first : first + int(np.prod(shape))].reshape(shape),
            grads[first : first + int(np.prod(shape))].reshape(shape),
        )
        for first, shape in places
    ]


def test_neighbours_are_one_run_and_views_of_it() -> None:
    parameters = placed([(0, (2, 8)), (16, (4, 4)), (32, (32,))])
    [run] = parameter_runs(parameters)
    assert run.parameters == tuple(parameters)
    np.testing.assert_array_equal(run.value, np.arange(64))
    run.value[20] = -1.0
    run.grad[...] = 2.0
    assert parameters[1].value[1, 0] == -1.0
    assert all((one.grad == 2.0).all() for one in parameters)


def test_a_gap_or_another_order_begins_a_new_run() -> None:
    first, second, third = placed([(0, (8,)), (9, (8,)), (17, (8,))])
    assert [len(run.parameters) for run in parameter_runs([first, second, third])] == [1, 2]
    assert [len(run.parameters) for run in parameter_runs([third, second])] == [1, 1]


def test_values_and_gradients_must_both_follow() -> None:
    first, second = placed([(0, (8,)), (8, (8,))])
    second.grad = np.zeros(8, np.float32)
    assert [run.value.size for run in parameter_runs([first, second])] == [8, 8]


def test_arrays_of_their_own_are_runs_of_their_own() -> None:
    parameters = [made(name, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)) for name in "ab"]
    runs = parameter_runs(parameters)
    runs[1].value[...] = 0.0
    assert parameters[0].value.all()
    assert not parameters[1].value.any()


def test_parts_of_a_matrix_are_not_joined() -> None:
    matrix = np.zeros((4, 8), np.float32)
    parameters = [made(str(row), matrix[row], np.zeros(8, np.float32)) for row in range(4)]
    assert len(parameter_runs(parameters)) == 4


def test_an_array_that_is_no_block_is_refused() -> None:
    array = np.zeros((3, 4), np.float32).T
    with pytest.raises(TrainingError, match="w: trained arrays must be C-contiguous"):
        parameter_runs([made("w", array, array)])


def test_runs_are_found_again_when_the_list_changes() -> None:
    runs = ParameterRuns()
    parameters = placed([(0, (8,)), (8, (8,))])
    assert runs.of(parameters) is runs.of(parameters)
    parameters.append(placed([(0, (4,))])[0])
    assert len(runs.of(parameters)) == 2
