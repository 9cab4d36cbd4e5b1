"""Figures, and the report as a browser shows it: every drawing is there and not blank, links lead somewhere."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from bench_samples import SAMPLES
from figures import main

from ucc_hetero.bench.drawings import drawings, render
from ucc_hetero.bench.files import write_json
from ucc_hetero.bench.readers import read_all

BROWSERS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")

#: Runs in the page when it is loaded; what it saw stands in an attribute of the body afterwards.
LOOK = """<script>
addEventListener("load", () => {
  const images = [...document.images].map((image) => {
    const canvas = document.createElement("canvas");
    canvas.width = image.width; canvas.height = image.height;
    const pen = canvas.getContext("2d");
    pen.fillStyle = "white"; pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(image, 0, 0, canvas.width, canvas.height);
    const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    let ink = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i] + pixels[i + 1] + pixels[i + 2] < 740) ink++;
      colours.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
    }
    return {alt: image.alt, width: image.width, height: image.height, ink: ink / (pixels.length / 4),
            colours: colours.size};
  });
  const links = [...document.querySelectorAll("nav a")].map((a) => !!document.getElementById(a.hash.slice(1)));
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  document.body.setAttribute("data-seen", JSON.stringify({
    images, links, tables: document.querySelectorAll("table").length,
    wide: document.documentElement.scrollWidth, window: innerWidth,
  }));
});
</script>"""


def browser() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: install one of {', '.join(BROWSERS)}, or name it in CHROMIUM")
    return found


def looked_at(page: Path, width: int) -> dict[str, Any]:
    copy = page.with_name("looked-at.html")
    copy.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},2000"),
        *(f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", copy.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(seen[1]))
    return found


def stored(folder: Path) -> list[Path]:
    paths = []
    for kind, data in SAMPLES.items():
        paths.append(folder / f"{kind}.json")
        write_json(str(paths[-1]), data)
    return paths


def test_report_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    browser()
    assert main(["report", *map(str, stored(tmp_path)), "-o", str(tmp_path / "out")]) == 0
    for width in (1280, 420):
        seen = looked_at(tmp_path / "out" / "index.html", width)
        assert len(seen["images"]) == 8
        for image in seen["images"]:
            assert image["width"] > 250 and image["height"] > 60, image
            # Lines and text, but no picture that is one colour.
            assert 0.005 < image["ink"] < 0.9 and image["colours"] > 20, image
        assert len(seen["links"]) == 9 and all(seen["links"])
        assert seen["tables"] >= len(SAMPLES)
        assert seen["wide"] <= seen["window"], "something sticks out of the page"


def test_everything_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    found = drawings(read_all(stored(tmp_path))[0], [(f"{kind}.json", data) for kind, data in SAMPLES.items()])
    assert [d.name for d in found] == [
        "allreduce-int8-latency", "iallreduce-int8-latency", "iallreduce-int8-overlap", "allreduce-float32-latency",
        "allreduce_on_4_GPU_1-float32-latency", "bcast_on_4_GPU_1-float32-latency",
        "cluster-cluster", "plans",
    ]  # fmt: skip
    texts = {d.name: " ".join(ElementTree.fromstring(render(d, "svg")).itertext()) for d in found}
    for name, words in {
        "allreduce-int8-latency": ("ours", "mpi4py", "limit", "message size [bytes]", "Latency [µs]"),
        "cluster-cluster": ("2x2: allreduce 64M", "limit"),
        "plans": ("tree", "split_rail"),
    }.items():
        for word in words:
            assert word in texts[name]
    assert render(found[0], "svg") == render(found[0], "svg")
