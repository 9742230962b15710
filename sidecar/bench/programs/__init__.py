"""What the benches' processes run, each started by :meth:`sidecar.bench.harness.Bench.launch`."""
