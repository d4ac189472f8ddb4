import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import jaxbatch as jb
from jaxbatch.prometheus import DispatcherCollector


def test_a_scrape_shows_what_the_dispatcher_counts():
    run = jb.batched(lambda x: x.sum(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=4, rows=(1, 2)))
    registry = CollectorRegistry()
    with run.dispatcher() as d:
        registry.register(DispatcherCollector({"sums": d}))
        for future in [d.submit(np.ones(3, np.float32)) for _ in range(5)]:
            future.result(60)
    text, label = generate_latest(registry).decode(), '{dispatcher="sums"}'
    assert f"jaxbatch_dispatcher_submitted_total{label} 5.0" in text
    assert 'jaxbatch_dispatcher_ended_total{dispatcher="sums",outcome="completed"} 5.0' in text
    assert f"jaxbatch_dispatcher_total_seconds_count{label} 5.0" in text
    assert f"jaxbatch_dispatcher_pending{label} 0.0" in text
    assert 'jaxbatch_dispatcher_total_seconds_latest{dispatcher="sums",quantile="0.99"}' in text
