"""The PyTorch backend: every method through torch.distributed, on one vendor and on two."""

import random

import pytest

#: These make torch load its compiler, which takes seconds on every rank.
COMPILED = [f"case_{name}" for name in ("functional", "results_of_functional_collectives", "compiled", "compiled_ddp")]
#: A repeated call of one step is made in C.
SHORT = ["case_few_frames", "case_few_frames_of_several_as_one", "case_split_sizes_bind_nothing", "case_random",
         "case_results_are_the_callers", "case_coalesced", "case_long_scatters",
         "case_inputs_inside_outputs"]  # fmt: skip
MODULES = ["torch_calls", "torch_collectives", "torch_profile", "torch_short"]
RUN = "torch_cases:run"


def test_every_method_on_two_vendors(crew):
    crew(RUN, 4, args=[MODULES, [], COMPILED], layout="nvidia:2,amd:2", timeout=160)


def test_compiled_and_repeated_calls_on_one_vendor(crew):
    crew(RUN, 2, args=[MODULES, COMPILED + SHORT], timeout=160)


@pytest.mark.parametrize(("n", "emulate"), [(2, ""), (4, "nvidia:2,amd:2")])
def test_experts(crew, n, emulate):
    crew(RUN, n, args=[["torch_experts"]], layout=emulate, timeout=100)


def test_experts_of_one_rank(crew):
    crew(RUN, 1, args=[["torch_experts"], ["case_gradients_of_a_layer", "case_rows_of_fixed_size"]])


def test_torchcomms(crew):
    n, emulate = random.choice([(1, ""), (2, ""), (3, "nvidia:2,amd:1")])
    crew("torchcomms_cases:calls", n, layout=emulate)


def test_gloo_is_a_peer_in_benchmarks(crew):
    words = ["compare --peers ours,gloo -m 8:8 -r 2"]
    words += [
        f"osu_{name} --peer gloo -m 8:8 -i 4 -x 1 -T mpi_float -c" for name in ("allreduce", "reduce_scatter", "bcast")
    ]
    words += [f"osu_{name} --peer gloo -m 8:8 -i 4 -x 1 -c" for name in ("latency", "bibw")]
    job = crew("bench_cases:right", args=words, timeout=150)
    lines = [line.split() for line in job.stdout.splitlines() if line.strip() and not line.startswith("#")]
    compared, *tables = lines
    assert len(tables) == len(words) - 1
    for table in tables:
        assert (compared[0], table[0], table[2]) == ("8", "8", "Pass")
        assert all(float(us) > 0 for us in (*compared[1:4], table[1], table[3]))


@pytest.mark.usefixtures("hooked")
def test_scripts_for_torchrun_run_unchanged(mpirun):
    name = random.choice(["nccl", "gloo"])
    job = mpirun("script_cases:for_torchrun", 2, args=[name], env={"UCCH_TORCH_REPLACE": name})
    assert job.said("fine") == 2
    assert "by ucch in place of" in job.stderr and f"cuda by {name}" not in job.stderr, job.stderr


def test_the_local_rank_is_the_launchers(mpirun):
    mpirun("script_cases:local_rank_of_the_launcher", 2)


def test_torchrun(torchrun):
    """Without MPI: the ranks meet at torch's store, also if mpirun has started torchrun."""
    names = [f"case_{name}" for name in ("futures", "groups", "failures", "coalesced", "messages")]
    env = {"UCCH_EMULATE": "nvidia:1,amd:1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    torchrun(RUN, [MODULES, names], **env)


def test_torchrun_starts_failed_ranks_again(torchrun):
    assert torchrun("script_cases:started_again", [], "--max-restarts", "1").count("[4.0, 4.0, 4.0]") == 2
