"""What a PerReplica is, and is not."""

import pytest
import torch
import torch.nn.functional as F

import mirror
from tests.strategy.programs import ids


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v + 1,
        lambda v: 1 + v,
        lambda v: v * v,
        lambda v: v - torch.ones(()),
        lambda v: torch.ones(()) - v,
        lambda v: v @ torch.ones(1, 1),
        lambda v: -v,
        lambda v: v > 0,
        lambda v: torch.add(v, 1),
        lambda v: torch.relu(v),
        lambda v: F.relu(v),
        lambda v: torch.stack([v, v]),
        lambda v: float(v),
        lambda v: abs(v),
        lambda v: v / 2,
        lambda v: 2**v,
    ],
)
def test_a_per_replica_used_as_a_tensor_is_a_type_error_with_advice(use, make_strategy):
    value = ids(make_strategy(2))
    with pytest.raises(TypeError) as error:
        use(value)
    for advice in ("run", "reduce", "local_results"):
        assert advice in str(error.value)


def test_values_is_a_tuple():
    assert mirror.PerReplica([1, 2]).values == (1, 2)
    assert mirror.PerReplica(i for i in range(2)).values == (0, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: f"{loss:.3f}",
        lambda loss: loss == 0,
        lambda loss: loss != torch.ones(()),
        lambda loss: divmod(loss, 2),
        lambda loss: divmod(2, loss),
    ],
)
def test_per_replica_values_refuse_numbers_business_with_advice(make_strategy, use):
    # Formatting a loss spoke of "PerReplica.__format__", and `loss == 0` was False in silence.
    strategy = make_strategy(2)
    loss = strategy.run(lambda: torch.ones(()))
    with pytest.raises(TypeError, match="holds one value per replica"):
        use(loss)
    assert loss == loss
    assert loss != "loss"
    assert loss in {loss}
    assert f"{loss}" == repr(loss)
