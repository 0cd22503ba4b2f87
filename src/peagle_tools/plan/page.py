"""plan.html: the break-even surface, and the model beside the cells, of each arm."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from peagle_tools.bench.plots import Plot, chart, heat_map, line, log_x
from peagle_tools.bench.report import html_page
from peagle_tools.plan.fit import Fitted, Judged
from peagle_tools.plan.model import Costs, speedup, throughput
from peagle_tools.plan.profile import from_alpha
from peagle_tools.plan.show import concurrencies, costs_line

ALPHAS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def surface(costs: Costs, depths: Sequence[int], max_num_seqs: int, title: str) -> Plot:
    """Speedup at the best K over acceptance and concurrency: where it falls to 1.00 is the break-even line."""
    columns = concurrencies(max_num_seqs)

    def square(alpha: float, requests: int) -> tuple[float, str]:
        gain, k = max((speedup(costs, from_alpha(alpha), requests, k), -k) for k in depths)
        return gain, f"{gain:.2f}\nK={-k}"

    squares = [[square(alpha, requests) for requests in columns] for alpha in ALPHAS]
    return heat_map(title, [f"alpha={alpha:g}" for alpha in ALPHAS], [f"c={c}" for c in columns], squares)


def model_chart(fitted: Fitted, judged: Sequence[Judged]) -> Plot:
    """Lines of the model, one a depth; dots are measured cells."""
    points = [j.point for j in judged]
    columns = sorted({p.concurrency for p in points})

    def paint(axes: Axes) -> None:
        for i, k in enumerate(sorted({p.k for p in points})):
            name, mine = f"K={k}" if k else "no speculation", [p for p in points if p.k == k]
            rates = [throughput(fitted.costs, fitted.profile, c, k) for c in columns]
            line(axes, f"{name}, model", columns, rates, i, dash=1, marker="")
            line(axes, f"{name}, measured", [p.concurrency for p in mine], [p.tokens_per_second for p in mine], i)
        log_x(axes, columns)
        axes.set_ylim(bottom=0)

    return chart(f"Model and cells: {fitted.arm}, {fitted.dataset}", "concurrency", "output tokens/s", paint)


def html(
    title: str,
    recommendations: Sequence[Sequence[str]],
    fits: Sequence[tuple[Fitted, Sequence[Judged]]],
    depths: Sequence[int],
    max_num_seqs: int,
) -> str:
    """The page; each recommendation is lines of text, of which one that begins with a brace is a config."""

    def parts() -> Iterator[str | Plot]:
        yield f"# {title}"
        for lines in recommendations:
            yield "\n\n".join(f"    {line}" if line.startswith("{") else line for line in lines)
        yield (
            "Speedup over no speculation at the best K, if every position were accepted with probability alpha: green "
            "gains, red loses, the border is break-even. This is the model alone. Columns beyond the measured "
            f"concurrency, c={min(fitted.known_to for fitted, _ in fits)}, are extrapolated."
        )
        for fitted, judged in fits:
            name = f"{fitted.arm}, {fitted.dataset}"
            yield f"## {name}\n\n{costs_line(fitted)}"
            yield surface(fitted.costs, depths, max_num_seqs, f"Break-even surface: {name}")
            yield model_chart(fitted, judged)

    return html_page(title, parts())
