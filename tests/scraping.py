"""What /metrics of a live server shows, as a program reads it."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from live_server import LiveServer


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of all samples."""
        return {sample.name for sample in self.samples}

    def __call__(self, stem: str, **labels: str) -> float:
        """The sum of the samples of a metric of ours that have these labels; 0 if there are none."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"tandem_{stem}" and labels.items() <= sample.labels.items()
        )


async def scrape(live: LiveServer) -> Scrape:
    """Reads /metrics over HTTP."""
    url = f"http://127.0.0.1:{live.server.metrics_port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            return response.read().decode()

    return Scrape(await asyncio.to_thread(read))
