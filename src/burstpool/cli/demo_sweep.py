"""A step of the demo: many settings of a small model, those of one width trained as one fused array."""

from burstpool.cli.demo_story import Story


def sweep_many(story: Story) -> None:
    """Over the handwritten digits."""
    from burstpool.cli.sweep import live_table, show_result
    from burstpool.sweeping.sweep import sweep

    with live_table() as observer:
        result = sweep(
            "zoo:tiny_mlp",
            {"lr": "log:1e-3..1e0", "width": [32, 64]},
            search="random",
            trials=story.num_trials,
            steps=200,
            threads=1,
            run_folder=story.folder / "sweep",
            observer=observer,
        )
    show_result(result, story.console, most=5, files=False)
