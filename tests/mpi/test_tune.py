"""``plan``, ``topo`` and ``tune`` on real ranks; tables reach every rank; local facts never make choices differ."""

import json


def test_tune_writes_what_later_jobs_follow(crew, tmp_path):
    table, layout = tmp_path / "table.json", "nvidia:2,amd:2"
    commands = [
        "plan allreduce 64K --run",
        "topo",
        f"tune --file {table} --collective allreduce --collective bcast --sizes 64:4K",
    ]
    out = crew("script_cases:commands", n=4, args=commands, layout=layout, timeout=120).stdout
    assert "measured" in out and "rank 3: amd memory" in out and out.count("allreduce  ") >= 3
    (entry,) = json.loads(table.read_text())["topologies"].values()
    assert entry["islands"] == "nvidia[0-1]@0 amd[2-3]@0" and entry["weights"] == []
    # Whichever was fastest on this machine: from here on the test's own rule.
    entry["rules"] = ["allreduce:0-1024:@ring:fragments=1", "bcast:0-inf:@flat:fragments=1"]
    data = json.loads(table.read_text())
    data["topologies"] = {next(iter(data["topologies"])): entry}
    table.write_text(json.dumps(data))
    crew("script_cases:unlike", n=4, layout=layout, env={"UCCH_TUNE_FILE": str(table)}, timeout=120)


def test_a_missing_table_and_missing_ranks_are_said(crew, tmp_path):
    script = "from ucc_hetero.__main__ import main\nassert main(['plan', 'bcast', '8']) != 0\n"
    alone = crew("from ucc_hetero.__main__ import main\nassert main(['tune']) == 1\n", n=1)
    assert "tune needs ranks: run it under mpirun" in alone.stderr
    said = crew(script, n=2, env={"UCCH_TUNE_FILE": str(tmp_path / "nothing.json")}).stderr
    assert "nothing.json cannot be read" in said and "python -m ucc_hetero tune" in said
