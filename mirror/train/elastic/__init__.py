"""Elastic training: workers are lost, replaced and added while the other workers go on."""

from mirror.train.elastic.elastic_run import ElasticState, run

__all__ = ["ElasticState", "run"]
