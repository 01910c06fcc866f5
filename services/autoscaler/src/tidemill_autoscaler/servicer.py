"""AutoscalerService: translates between gRPC and the controller."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from tidemill.mesh.v1 import autoscaler_pb2, autoscaler_pb2_grpc, common_pb2
from tidemill.v1 import errors_pb2
from tidemill_autoscaler.controller import Controller, role_status
from tidemill_autoscaler.policy import Bounds
from tidemill_mesh.errors import MeshError

log = structlog.get_logger()


class AutoscalerServicer(autoscaler_pb2_grpc.AutoscalerServiceServicer):
    """Status, and bounds at run time."""

    def __init__(
        self,
        controller: Controller,
        instance: Callable[[], common_pb2.InstanceRef],
        bounds_file: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller, self._instance, self._clock = controller, instance, clock
        self._bounds_file = Path(bounds_file) if bounds_file else None
        self._load_bounds()

    async def GetAutoscalerStatus(
        self, request: autoscaler_pb2.GetAutoscalerStatusRequest, context: Any
    ) -> autoscaler_pb2.GetAutoscalerStatusResponse:
        """What is seen and was decided."""
        del request, context
        now = self._clock()
        return autoscaler_pb2.GetAutoscalerStatusResponse(
            instance=self._instance(),
            leader=self._controller.leader,
            actuator=self._controller.actuator.name,
            pools=[autoscaler_pb2.PoolStatus(**role_status(pool, now)) for pool in self._controller.pools.values()],
            counters=self._controller.counters,
        )

    async def SetBounds(
        self, request: autoscaler_pb2.SetBoundsRequest, context: Any
    ) -> autoscaler_pb2.SetBoundsResponse:
        """New bounds of a role; they outlive a restart if there is a bounds file."""
        del context
        if request.role not in self._controller.pools:
            roles = ", ".join(self._controller.pools)
            raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, f"role must be one of {roles}", field="role")
        bounds = Bounds(request.min_replicas, request.max_replicas)
        problem = bounds.problem()
        if problem:
            raise MeshError(errors_pb2.ERROR_CODE_INVALID_ARGUMENT, problem, field=problem.split()[0])
        self._controller.set_bounds(request.role, bounds)
        self._save_bounds()
        return autoscaler_pb2.SetBoundsResponse()

    def _save_bounds(self) -> None:
        if self._bounds_file is None:
            return
        said = {role: pool.planner.bounds for role, pool in self._controller.pools.items()}
        text = json.dumps({role: [bounds.min_replicas, bounds.max_replicas] for role, bounds in said.items()})
        partial = self._bounds_file.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self._bounds_file)

    def _load_bounds(self) -> None:
        if self._bounds_file is None or not self._bounds_file.exists():
            return
        try:
            for role, (low, high) in json.loads(self._bounds_file.read_text()).items():
                if role in self._controller.pools:
                    self._controller.set_bounds(role, Bounds(int(low), int(high)))
        except (ValueError, TypeError, AttributeError) as error:
            log.error("bounds file cannot be read: settings apply", file=str(self._bounds_file), error=str(error))
