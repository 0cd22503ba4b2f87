"""plan.html: the break-even surface, and the model beside the cells, of each arm."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from peagle_vllm.bench.plots import Plot, chart, heat_map, line, log_x
from peagle_vllm.bench.report import html_page
from peagle_vllm.plan.fit import Fitted, Judged
from peagle_vllm.plan.model import Costs, speedup, throughput
from peagle_vllm.plan.profile import from_alpha
from peagle_vllm.plan.show import concurrencies, costs_line

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


def html(title: str, fits: Sequence[tuple[Fitted, Sequence[Judged]]], depths: Sequence[int], max_num_seqs: int) -> str:
    def parts() -> Iterator[str | Plot]:
        yield f"# {title}"
        yield (
            "Speedup over no speculation at the best K, if every position were accepted with probability alpha: green "
            "gains, red loses, the border is break-even. Columns beyond the measured concurrency are extrapolated."
        )
        for fitted, judged in fits:
            name = f"{fitted.arm}, {fitted.dataset}"
            yield f"## {name}\n\n{costs_line(fitted)}"
            yield surface(fitted.costs, depths, max_num_seqs, f"Break-even surface: {name}")
            yield model_chart(fitted, judged)

    return html_page(title, parts())
