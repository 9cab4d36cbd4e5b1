"""Numbers of transfers, for vLLM's log and its metrics."""

from __future__ import annotations

from typing import Any

from .interface import KVConnectorStats


class Stats(KVConnectorStats):  # type: ignore[misc]
    """What a worker, or an engine, has done since its last report. ``data`` has the seconds and bytes of each load, the
    number of loads that failed, and of requests whose blocks were not all fetched within the lease."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not data:
            self.reset()

    def reset(self) -> None:
        self.data = {"seconds": [], "bytes": [], "failed": 0, "expired": 0}

    def loaded(self, seconds: float, nbytes: int) -> None:
        self.data["seconds"].append(seconds)
        self.data["bytes"].append(nbytes)

    def take(self) -> Stats | None:
        """The numbers since the last call; None if nothing has happened."""
        if self.is_empty():
            return None
        out = Stats(self.data)
        self.reset()
        return out

    def aggregate(self, other: Any) -> Stats:
        """Add another worker's numbers, or those of a later time."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers as vLLM logs them."""
        seconds, nbytes = sorted(self.data["seconds"]), sum(self.data["bytes"])
        count, total = len(seconds), sum(seconds)
        return {
            "Num loads": count,
            "Avg load time (ms)": round(1e3 * total / count, 3) if count else 0,
            "P90 load time (ms)": round(1e3 * seconds[9 * (count - 1) // 10], 3) if count else 0,
            "Avg MB per load": round(nbytes / count / 2**20, 3) if count else 0,
            "Throughput (MB/s)": round(nbytes / total / 2**20, 3) if total else 0,
            "Num failed loads": self.data["failed"],
            "Num expired requests": self.data["expired"],
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


def metrics(*described: Any) -> Any:
    """The same as metrics of Prometheus; the arguments are those of vLLM's ``build_prom_metrics``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.metrics.utils import create_metric_per_engine

    class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]
        def __init__(self, *described: Any) -> None:
            super().__init__(*described)
            times, sizes = [0.001 * 4**i for i in range(9)], [float(1 << i) for i in range(10, 36, 2)]
            self.each = {
                "seconds": self._made(self._histogram_cls, "load_seconds", "Time of a KV load.", buckets=times),
                "bytes": self._made(self._histogram_cls, "load_bytes", "Bytes of a KV load.", buckets=sizes),
                "failed": self._made(self._counter_cls, "failed_loads", "KV loads that failed."),
                "expired": self._made(self._counter_cls, "expired_requests", "Requests not fetched in the lease."),
            }

        def _made(self, kind: Any, name: str, documentation: str, **more: Any) -> Any:
            names = {"name": f"vllm:ucc_hetero_{name}", "documentation": documentation}
            return create_metric_per_engine(
                kind(**names, labelnames=self._labelnames, **more), self.per_engine_labelvalues
            )

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            for name in ("seconds", "bytes"):
                for value in transfer_stats_data[name]:
                    self.each[name][engine_idx].observe(value)
            for name in ("failed", "expired"):
                self.each[name][engine_idx].inc(transfer_stats_data[name])

    return Metrics(*described)
