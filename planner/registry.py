"""Names that a configuration or a request may use for policies and estimators."""

from __future__ import annotations

from collections.abc import Callable

from planner.adaptive import AdaptiveConfig, AdaptivePolicy
from planner.baselines import Ewma, HarmonicMean, LastSample, MedianRate, RobustMpc
from planner.errors import UnknownEstimator, UnknownPolicy
from planner.estimator import PredictiveEstimator
from planner.mpc import MpcPolicy
from planner.policies import CachegenPolicy, FixedPolicy, Policy, TextPolicy
from planner.samples import Estimator
from planner.site import SiteModel

FASTEST_LOSS_PER_TOKEN = 0.04
"""`kvtide-fastest` takes no level that loses more, where there is another. Unit: KL per token, nats.
It lets through the levels measured so far that are of use: klt:0-3 (0.002 to 0.038), cachegen:0-2."""
_FIXED_PREFIX = "fixed:"

_POLICIES: dict[str, Callable[[], Policy]] = {
    "text": TextPolicy,
    "fp16": lambda: FixedPolicy("fp16", name="fp16"),
    "int8": lambda: FixedPolicy("int8", name="int8"),
    "cachegen": CachegenPolicy,
    "robust-mpc": MpcPolicy,
    "kvtide": AdaptivePolicy,
    "kvtide-fastest": lambda: AdaptivePolicy(
        AdaptiveConfig(fastest_with_loss_per_token=FASTEST_LOSS_PER_TOKEN), name="kvtide-fastest"
    ),
}
_ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "last-sample": LastSample,
    "median-rate": MedianRate,
    "ewma": Ewma,
    "harmonic-mean": HarmonicMean,
    "robust-mpc": RobustMpc,
    "predictive": PredictiveEstimator,
}


def policy_names() -> tuple[str, ...]:
    """Names for `make_policy`; ``fixed:<level>`` stands for any level."""
    return (*_POLICIES, _FIXED_PREFIX + "<level>")


def estimator_names() -> tuple[str, ...]:
    """Names for `make_estimator`."""
    return tuple(_ESTIMATORS)


def default_estimator(policy: str) -> str:
    """Name the estimator that suits a policy: one that knows its uncertainty where the policy uses it."""
    if policy.startswith("kvtide"):
        return PredictiveEstimator.name
    return MedianRate.name


def make_policy(name: str) -> Policy:
    """Build a policy: one per request, because a policy may remember.

    Raises:
        UnknownPolicy: no such name.
    """
    if name.startswith(_FIXED_PREFIX) and len(name) > len(_FIXED_PREFIX):
        return FixedPolicy(name.removeprefix(_FIXED_PREFIX))
    if name not in _POLICIES:
        raise UnknownPolicy(name, policy_names())
    return _POLICIES[name]()


def make_estimator(name: str, *, site: SiteModel | None = None) -> Estimator:
    """Build an estimator for one transfer.

    Args:
        name: one of `estimator_names`.
        site: what the site has learned about this uplink; the predictive estimator begins with it and
            teaches it. Shared by all transfers over the uplink; the others ignore it.

    Raises:
        UnknownEstimator: no such name.
    """
    if name not in _ESTIMATORS:
        raise UnknownEstimator(name, estimator_names())
    if name == PredictiveEstimator.name:
        return PredictiveEstimator(site)
    return _ESTIMATORS[name]()
