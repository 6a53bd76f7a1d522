"""Output tokens a second of pagegraft and of other engines: same weights, same requests, same machine, one by one.

    python tests/performance/peers.py prepare FOLDER             # environments, and the model in every form; ~14 GB
    python tests/performance/peers.py run FOLDER [NAME ...] [--requests 32] [--before "nice -n -5"]
    python tests/performance/peers.py report FOLDER              # the table, from all runs so far

All requests arrive at once: prompts of 16 to 512 random tokens, 16 to 256 output tokens, log-uniform (the workload of
`pagegraft bench`), greedy, each output to its full length. Each engine has a process of its own, one at a time; loading
and two short requests of warming up are not counted. `run` without names takes pagegraft first, everybody else, and
pagegraft again, which shows how much the machine changed meanwhile; every run is appended to FOLDER/runs.jsonl and
`report` takes medians. FOLDER/outputs keeps the tokens: engines that compute in float32 must give pagegraft's until two
tokens are about equally likely, and `report` says how far each agrees. Random prompts leave many such ties, so a
rounded model soon says something else: the share is a check of sameness, not a measure of quality.

`prepare` wants a network, a C++ compiler and cmake (llama.cpp is compiled for this machine, as its prebuilt wheels lack
AVX-512). What cannot be installed is said and left out: `run` skips contenders without an environment or model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pagegraft.runtime.bench.workload import WorkloadOptions, make_workload
from peer_engines.contenders import CONTENDERS, Contender
from peer_engines.peers_prepare import prepare
from peer_engines.peers_report import report

_HERE = Path(__file__).parent
_FIRST = CONTENDERS[0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "run", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(c.name for c in CONTENDERS))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", default="", help="command put before each engine's")
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(options.folder)
    elif options.action == "run":
        run_all(options)
    else:
        report(options.folder, options.requests, CONTENDERS)


def run_all(options: argparse.Namespace) -> None:
    """Runs the contenders named, or all with pagegraft first and last."""
    known = {contender.name: contender for contender in CONTENDERS}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in options.names] or [*CONTENDERS, _FIRST]
    for contender in chosen:
        python = _python(options.folder, contender)
        model = options.folder / "models" / contender.model
        missing = [str(path) for path in (python, model) if not path.exists()]
        if missing:
            print(f"{contender.name}: left out, there is no {' and no '.join(missing)}", flush=True)
            continue
        entry = run_one(contender, python, model, options)
        print(f"{contender.name}: " + _summary(entry), flush=True)
        with (options.folder / "runs.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")


def run_one(contender: Contender, python: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One measurement; a failure is an entry with `error`, the last lines that the engine wrote."""
    vocab_size = json.loads((options.folder / "models/export/config.json").read_text())["vocab_size"]
    workload = make_workload(WorkloadOptions(requests=options.requests, seed=options.seed), vocab_size)
    job = {
        "model": str(model),
        "threads": options.threads,
        "requests": [[list(request.prompt), request.output_length] for request in workload],
        "settings": dict(contender.settings),
    }
    entry: dict[str, Any] = {
        "name": contender.name,
        "requests": options.requests,
        "seed": options.seed,
        "threads": options.threads,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+") as log:
        job_file, result_file = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_file.write_text(json.dumps(job))
        module = _HERE / "peer_engines" / f"{contender.engine}_engine.py"
        command = [*shlex.split(options.before), str(python), str(module), str(job_file), str(result_file)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not result_file.exists():
            log.seek(0)
            return {**entry, "error": log.read()[-3000:], "code": process.returncode}
        result = json.loads(result_file.read_text())
    outputs = options.folder / "outputs"
    outputs.mkdir(exist_ok=True)
    (outputs / f"{contender.name}-{options.requests}-{options.seed}.json").write_text(json.dumps(result.pop("outputs")))
    first = sorted(result.pop("first_token_seconds") or [])
    return {
        **entry,
        **result,
        "ttft_seconds_mean": sum(first) / len(first) if first else None,
        "ttft_seconds_p50": first[len(first) // 2] if first else None,
        "peak_bytes": usage.ru_maxrss * 1024,  # of the largest process among the engine's
    }


def _python(folder: Path, contender: Contender) -> Path:
    if not contender.environment:
        return Path(sys.executable)
    return folder / "environments" / contender.environment / "bin" / "python"


def _summary(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f"failed with code {entry['code']}\n{entry['error']}"
    return (
        f"{entry['output_tokens'] / entry['seconds']:.1f} output tokens/s ({entry['seconds']:.1f} s), "
        f"peak {entry['peak_bytes'] / 2**30:.2f} GiB, loaded in {entry['load_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
