"""``ucch-run k8s``: the cluster file as a Volcano job, to be given to ``kubectl apply``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine.vendors import VENDORS
from . import cluster as cluster_file
from .cluster import Cluster, ClusterError
from .command import checked, program_of, renderer
from .sources import Host

#: In the images of containers/: the user's keys, and the process of a pod that waits for ranks.
SSH = "/home/ucch/.ssh"
WORKER = ["ucch-worker"]
LAUNCHER_IMAGE = "ucc-hetero:launcher"
FILE = "/etc/ucch/cluster.yaml"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Task:
    """Pods that are alike: of one vendor, with as many slots."""

    name: str
    vendor: str
    slots: int
    count: int


def _tasks(cluster: Cluster) -> list[Task]:
    if not _NAME.fullmatch(cluster.name):
        raise ClusterError(f"name: {cluster.name!r} cannot be the name of pods: use small letters, digits and hyphens")
    kinds: dict[tuple[str, int], list[Host]] = {}
    for host in cluster.hosts:
        if host.vendor == "auto":
            raise ClusterError(
                f"hosts: give the vendor of {host.name}: Kubernetes has to know which devices a pod needs"
            )
        if not cluster.part(host.vendor).image:
            raise ClusterError(f"vendors.{host.vendor}.image: is missing, and pods are made of images")
        kinds.setdefault((host.vendor, host.slots), []).append(host)
    seen: dict[str, int] = {}
    found = []
    for (vendor, slots), hosts in kinds.items():
        number = seen[vendor] = seen.get(vendor, 0) + 1
        found.append(Task(vendor if number == 1 else f"{vendor}{number}", vendor, slots, len(hosts)))
    return found


def _worker(cluster: Cluster, task: Task) -> dict[str, Any]:
    """A pod that takes ranks: its vendor's image and devices, an sshd, and shared memory beyond the usual 64 MiB."""
    part = cluster.part(task.vendor)
    resource = VENDORS[task.vendor].resource
    container: dict[str, Any] = {
        "name": "ranks",
        "image": part.image,
        "command": WORKER,
        "ports": [{"name": "ssh", "containerPort": 2222}],
        # Registered memory is pinned, and neighbours' memory is read directly.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_PTRACE"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if resource:
        container["resources"] = {"limits": {resource: task.slots}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if part.node_selector:
        spec["nodeSelector"] = dict(part.node_selector)
    return {"spec": spec}


def _launcher(cluster: Cluster, program: Sequence[str], image: str) -> dict[str, Any]:
    container = {
        "name": "launcher",
        "image": image,
        "command": ["ucch-run", "--launcher", "openmpi", "-c", FILE, "--", *program],
        "volumeMounts": [{"name": "cluster", "mountPath": str(Path(FILE).parent)}],
    }
    return {
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "cluster", "configMap": {"name": f"{cluster.name}-cluster"}}],
        }
    }


def documents(cluster: Cluster, program: Sequence[str], launcher_image: str = LAUNCHER_IMAGE) -> list[dict[str, Any]]:
    """The launcher's cluster file, whose hosts are the pods, and a Volcano job: all pods or none, a task per vendor.

    The job is done when the master is.

    Raises ``ClusterError`` for a file that does not say what Kubernetes has to know.
    """
    import yaml

    tasks = _tasks(cluster)
    # The names that Volcano's svc plugin gives pods.
    hosts = [
        {"name": f"{cluster.name}-{task.name}-{i}.{cluster.name}", "slots": task.slots, "vendor": task.vendor}
        for task in tasks
        for i in range(task.count)
    ]
    # The images have their interpreter in the same place, under this name.
    inner = {**cluster_file.as_document(cluster), "python": cluster.python or "python3", "hosts": hosts}
    file, job = ({"name": name, "namespace": cluster.namespace} for name in (f"{cluster.name}-cluster", cluster.name))
    data = {Path(FILE).name: yaml.safe_dump(inner, sort_keys=False)}
    spec = _spec(cluster, tasks, _launcher(cluster, program, launcher_image))
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": file, "data": data},
        {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": job, "spec": spec},
    ]


def _spec(cluster: Cluster, tasks: Sequence[Task], launcher: dict[str, Any]) -> dict[str, Any]:
    master = {
        "name": "master",
        "replicas": 1,
        "policies": [{"event": "TaskCompleted", "action": "CompleteJob"}],
        "template": launcher,
    }
    workers = [{"name": task.name, "replicas": task.count, "template": _worker(cluster, task)} for task in tasks]
    return {
        "schedulerName": "volcano",
        "queue": cluster.queue,
        "minAvailable": 1 + sum(task.count for task in tasks),
        "maxRetry": 1,
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"], "ssh": [f"--ssh-key-file-path={SSH}"]},
        "policies": [
            {"event": "PodFailed", "action": "AbortJob"},
            {"event": "PodEvicted", "action": "AbortJob"},
        ],
        "tasks": [master, *workers],
    }


def lines(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The documents as one YAML stream."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes equal lists twice, not as references, which people do not read."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        """The cluster file as people write it, not as one long line."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Plain.add_representer(str, text)
    for document in documents:
        yield "---\n" + yaml.dump(document, Dumper=Plain, sort_keys=False)


def main(arguments: Sequence[str]) -> int:
    """The command line: prints the manifest."""
    parser = renderer("k8s", "Print a Kubernetes job for a cluster file; give it to kubectl apply -f -.")
    parser.add_argument("--launcher-image", default=LAUNCHER_IMAGE, metavar="IMAGE", help="default %(default)s")
    options = parser.parse_args(arguments)
    program = program_of(options.program)
    checked(program, "k8s -c cluster.yaml")
    print("".join(lines(documents(cluster_file.load(options.cluster), program, options.launcher_image))), end="")
    return 0
