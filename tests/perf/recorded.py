"""The recorded training runs that the planner's whole model is held to."""

from tilemoe.bench import record

BF16_STREAM = "2026-11-30T17:30"  # until then the residual stream was fp32 under autocast


def runs(*names: str) -> list[record.Row]:
    """Of ours, in results/<name>.jsonl, as the trainer computes today."""
    rows = [row for name in names for row in record.rows(name, contestant="tilemoe")]
    return [row for row in rows if row.get("sharded", row["processes"] > 1) or row["time"] > BF16_STREAM]
