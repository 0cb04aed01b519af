"""`run.json`: what is written down about a run beside its points, fit to be published.

What:   `run_document` puts together arm, parameters, rig, model, engine, flags, server starts and validity; `scrub` takes the paths of this
        machine out of anything that goes into a record.
Why:    a record must say all that is needed to repeat it, and nothing about whoever made it.
Use:    draft.finish(run_document(job, draft, starts), logs)     (see `measure`)
Not:    points and raw rows (`records`).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import jobs, records, shapes, stats
from .engines import engine
from .quantized import SERVING_BYTES, weight_facts

# Folder of this machine -> what a record calls it. `measure` adds the repository, the records and the models.
PATHS = {str(Path(sys.prefix)): "<venv>", str(Path(sys.base_prefix)): "<python>", tempfile.gettempdir(): "<temporary>", str(Path.home()): "~"}


def run_document(job: jobs.Job, draft: records.Draft, starts: list[dict[str, Any]], refused: dict[str, str] | None = None) -> dict[str, Any]:
    """`run.json` without its id and dates: everything that is not a point."""
    points = draft.points()
    invalid = {point["point"]: point["validity"]["reasons"] for point in points if not point["validity"]["valid"]}
    return {
        "post": job.protocol.name, "arm": job.arm.name, "set_id": job.set_id, "set_arms": job.set_arms,
        "parameters": jobs.strict(job.values), "identity": job.identity,
        "rig": {"name": job.rig.name, "title": job.rig.title, "kind": job.rig.kind, "note": job.rig.note},
        "model": job.model | {"config_digest": job.identity["model_config"], "config": _config(job.folder), **_weights(job.folder, job.model)},
        "engine": {"name": "vLLM", "version": job.engine.version, "table_exact": engine(job.engine.version).exact}, "flags": job.flags,
        "settings": jobs.strict(job.settings), "ceiling_req_s": jobs.ceiling(points),
        "client_import_s": max((start["client_import_s"] for start in starts if start.get("client_import_s")), default=None),
        "starts": scrub(starts), "units": {"time": "10 us on the run's clock"},
        "percentile_rule": stats.RULE,
        "validity": {"points": len(points), "invalid": invalid},
        **({"not_testable": refused} if refused else {}),
    }


def _weights(folder: str, model: dict[str, Any]) -> dict[str, Any]:
    """`facts` and `weight_bytes` of a model table: counted from the shape, or from the headers of the files; null for a model of a hub."""
    dtype = model.get("dtype")
    if "shape" in model:
        facts = shapes.facts(model["shape"], SERVING_BYTES.get(dtype, 2))  # without a dtype the server takes the 16 bits of config.json
        return {"facts": facts, "weight_bytes": facts["loaded_bytes"]}
    return {"facts": weight_facts(folder, dtype) if Path(folder).is_dir() else None, "weight_bytes": jobs.weight_bytes(folder, dtype)}


def _config(folder: str) -> dict[str, Any] | None:
    """The model's shape as its config.json gives it; null for a model that vLLM fetches from a hub by itself."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def scrub(value: Any) -> Any:
    """Replace this machine's home and repository paths, so that a record can be published as it is."""
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    if isinstance(value, list):
        return [scrub(each) for each in value]
    if isinstance(value, str):
        for path, name in sorted(PATHS.items(), key=lambda pair: -len(pair[0])):
            if len(path) > 1:  # a home of "/" would eat every slash
                value = re.sub(re.escape(path) + r"(?![\w.-])", name, value)
    return value
