"""How a step, its checkpoints and its failures scale with the number of nodes, as Markdown.

    python3 -m benchmarks.scale --compute 0.35 --gpus-per-node 8 --bandwidth 400 …
    python3 -m benchmarks.scale --measure          1, 2 and 4 gloo ranks in the image, and the model

The first needs nothing but Python. Set --compute, --bandwidth, --write-rate and --node-mtbf to what
you measured; the defaults are assumptions, no measurements. docs/scale.md tells the formulas.
"""

import argparse

from benchmarks.scale import measure, model

NODES = (1, 2, 8, 128, 2048)
PARAMETERS = {"resnet50": 25_557_032, "1b": 1e9}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--measure", action="store_true", help="measure gloo ranks on this machine instead")
    add("--nodes", type=int, nargs="+", default=NODES)
    add("--gpus-per-node", type=int, default=8)
    add("--model", default="1b", help="resnet50, 1b, or a number of parameters (1b)")
    add("--gradients", choices=["fp32", "bf16"], default="fp32", help="as they are sent (fp32)")
    add("--compute", type=float, default=0.35, help="seconds of a step on one GPU (0.35)")
    add("--bandwidth", type=float, default=100, help="Gbit/s of a ring's slowest link (100)")
    add("--latency", type=float, default=10, help="microseconds for each message (10)")
    add("--bucket-mib", type=float, default=model.BUCKET_MIB, help="DDP's bucket_cap_mb (25)")
    add("--copies", type=int, default=4, help="FP32 values per parameter: Adam and EMA are 4")
    add("--write-rate", type=float, default=1, help="GB/s of rank 0's storage (1)")
    add("--restart", type=float, default=300, help="seconds from a failure to the next step (300)")
    add("--node-mtbf", type=float, default=50_000, help="hours between failures of a node (50000)")
    add("--grace", type=float, default=30, help="seconds between SIGTERM and SIGKILL (30)")
    asked = parser.parse_args()
    positive = vars(asked).keys() - {"measure", "latency", "restart", "model", "gradients", "nodes"}
    for name in sorted(positive):
        if getattr(asked, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} needs to be above 0")
    if min(asked.nodes) < 1:
        parser.error("--nodes needs numbers from 1 on")
    try:
        asked.parameters = PARAMETERS.get(asked.model) or float(asked.model)
    except ValueError:
        parser.error(f"--model is {asked.model!r}; give resnet50, 1b or a number of parameters")
    if asked.parameters <= 0:
        parser.error("--model needs more than 0 parameters")
    return asked


def steps(asked: argparse.Namespace) -> list[str]:
    """The table of step times."""
    trained = model.Model(asked.parameters, 4 if asked.gradients == "fp32" else 2)
    network = model.Network(asked.bandwidth * 1e9, asked.latency / 1e6)
    rows = [
        "| nodes | GPUs | all-reduce, s | not hidden, s | step, s | efficiency |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for nodes in asked.nodes:
        ranks = nodes * asked.gpus_per_node
        step = model.step(trained, asked.compute, ranks, network, asked.bucket_mib)
        rows.append(
            f"| {nodes} | {ranks} | {step.communication:.3f} | {step.exposed:.3f} | "
            f"{step.total:.3f} | {step.efficiency:.0%} |"
        )
    return rows


def failures(asked: argparse.Namespace) -> list[str]:
    """The table of failures and checkpoints."""
    rows = [
        "| nodes | hours between failures | checkpoint every, min | time lost |",
        "| --- | --- | --- | --- |",
    ]
    write = model.checkpoint_bytes(asked.parameters, asked.copies) / asked.write_rate / 1e9
    for nodes in asked.nodes:
        hours = model.mean_time_between_failures(asked.node_mtbf, nodes)
        interval = model.checkpoint_interval(write, hours * 3600)
        lost = model.lost_fraction(interval, write, asked.restart, hours * 3600)
        rows.append(f"| {nodes} | {hours:.0f} | {interval / 60:.0f} | {lost:.1%} |")
    return rows


def main() -> None:
    """Print the tables."""
    asked = arguments()
    if asked.measure:
        measure.main()
        return
    size = model.checkpoint_bytes(asked.parameters, asked.copies)
    write = size / asked.write_rate / 1e9
    fits = "fits into" if write < asked.grace else "does NOT fit into"
    print(
        f"{asked.parameters:,.0f} parameters, gradients in {asked.gradients}, {asked.compute} s of "
        f"compute, {asked.bandwidth:g} Gbit/s, {asked.latency:g} µs\n"
    )
    print("\n".join(steps(asked)))
    print(
        f"\ncheckpoint: {size / 1e9:.2f} GB, written in {write:.1f} s; that {fits} the "
        f"{asked.grace:g} s between SIGTERM and SIGKILL, if the step in progress is short\n"
    )
    print("\n".join(failures(asked)))


if __name__ == "__main__":
    main()
