"""From delivery samples to decisions: pure, clock-free, numpy only."""

from __future__ import annotations

from planner.baselines import LastSample, MedianRate
from planner.errors import (
    InvalidHistory,
    InvalidSample,
    InvalidState,
    LevelUnavailable,
    PlannerError,
    UnknownEstimator,
    UnknownPolicy,
)
from planner.model import (
    TEXT,
    Choice,
    ChunkOptions,
    ChunkProgress,
    Decision,
    Reason,
    Stage,
    TransferState,
    WorkerProgress,
)
from planner.policies import CachegenPolicy, FixedPolicy, Policy, TextPolicy
from planner.registry import (
    default_estimator,
    estimator_names,
    make_estimator,
    make_policy,
    policy_names,
)
from planner.samples import DeliverySample, Estimator
from planner.site import SiteModel

__all__ = [
    "TEXT",
    "CachegenPolicy",
    "Choice",
    "ChunkOptions",
    "ChunkProgress",
    "Decision",
    "DeliverySample",
    "Estimator",
    "FixedPolicy",
    "InvalidHistory",
    "InvalidSample",
    "InvalidState",
    "LastSample",
    "LevelUnavailable",
    "MedianRate",
    "PlannerError",
    "Policy",
    "Reason",
    "SiteModel",
    "Stage",
    "TextPolicy",
    "TransferState",
    "UnknownEstimator",
    "UnknownPolicy",
    "WorkerProgress",
    "default_estimator",
    "estimator_names",
    "make_estimator",
    "make_policy",
    "policy_names",
]
