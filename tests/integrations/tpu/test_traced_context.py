"""In a step there is one replica for all; what it cannot say is refused with another way."""

from types import SimpleNamespace

import pytest
import torch

from mirror.errors import StrategyError
from mirror.integrations.tpu.traced_call import make_traced_replica

strategy = SimpleNamespace(num_replicas_in_sync=3, devices=(torch.device("cpu"),) * 3)


def test_it_knows_how_many_there_are():
    context = make_traced_replica(strategy).context
    assert (context.num_replicas_in_sync, context.strategy) == (3, strategy)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("all_reduce", "strategy.reduce"),
        ("all_gather", "strategy.gather"),
        ("merge_call", "between runs"),
        ("replica_id_in_sync_group", "results of run"),
        ("device", "x.device"),
        ("weight", "weight_of"),
    ],
)
def test_the_rest_is_refused(name, way):
    context = make_traced_replica(strategy).context
    with pytest.raises(StrategyError, match=f"has no {name}; .*{way}"):
        getattr(context, name)
    with pytest.raises(StrategyError, match=f"has no {name}"):
        setattr(context, name, 1)


def test_an_unknown_name_is_none():
    assert not hasattr(make_traced_replica(strategy).context, "all_to_all")
