"""torchft: replicas that may be killed, hang, join and come back while the others continue training."""

from .elastic_gradients import ElasticGradients
from .elastic_local_steps import ElasticLocalSteps
from .replicas import LostReplica, Replicas
from .state_server import StateServer

__all__ = ["ElasticGradients", "ElasticLocalSteps", "LostReplica", "Replicas", "StateServer"]
