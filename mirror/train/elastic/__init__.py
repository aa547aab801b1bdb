"""Elastic training: workers are lost, replaced and added while the other workers go on."""

from mirror.train.elastic.elastic_run import run
from mirror.train.elastic.elastic_state import ElasticState

__all__ = ["ElasticState", "run"]
