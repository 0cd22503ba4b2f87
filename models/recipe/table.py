"""Write the tables of README.md from RESULTS.json, between their markers."""

from pathlib import Path

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def results_table(results: dict) -> str:
    """Markdown: one row an arm, acceptance per draft position in its last column."""
    lines = ["| target | head | K | AL | acceptance per position |", "|---|---|---|---|---|"]
    for row in results["arms"]:
        per_position = " ".join(f"{share:.2f}" for share in row.get("acceptance", []))
        lines.append(
            f"| {row['target']} | {row['head'] or 'none'} | {row['k'] or ''} | {row['al']:.2f} | {per_position} |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    protocol = results["protocol"]
    setting = f"at most {protocol['max_tokens']} tokens each, greedy, {protocol['dtype']}, one thread; {versions}."
    lines += ["", f"{protocol['prompts']} held-out chat prompts, {setting}"]
    return "\n".join(lines)


def budget_table(results: dict) -> str:
    """Markdown: what training each head took."""
    lines = ["| head | layers | trained depth | parameters | exchanges seen | TFLOP | learning rate |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, row in results["training"].items():
        if "mflop_an_exchange" in row:
            tflop = row["exchanges_seen"] * row["mflop_an_exchange"] / 1e6
            rate = row.get("muon_lr", 0.01)
            lines.append(
                f"| {name} | {row['layers']} | {row['trained_depth']} | {row['parameters']:,} "
                f"| {row['exchanges_seen']:,} | {tflop:.1f} | {rate} |"
            )
    return "\n".join(lines)


def sizes_table(models: Path) -> str:
    """Markdown: size of every safetensors file."""
    files = sorted(models.glob("tiny-*/model.safetensors"))
    lines = ["| model | MB |", "|---|---|"]
    lines += [f"| {file.parent.name} | {file.stat().st_size / 1e6:.2f} |" for file in files]
    lines.append(f"| all | {sum(file.stat().st_size for file in files) / 1e6:.2f} |")
    return "\n".join(lines)


def write_table(results: dict, models: Path) -> None:
    """Replace the text between the markers of ``models / README.md``, where that file exists."""
    readme = models / "README.md"
    if not readme.exists():
        return
    head, rest = readme.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    readme.write_text(
        f"{head}{BEGIN}\n{results_table(results)}\n\n{budget_table(results)}\n\n{sizes_table(models)}\n{END}{tail}"
    )
