"""The JSON schema of both dialects, from the same tables the readers check with."""

from podway.task import dstack_keys, skypilot_keys
from podway.task.shapes import schema


def json_schema() -> dict[str, object]:
    """Draft 2020-12: a file with `type:` is dstack's, any other SkyPilot's."""
    definitions = {"skypilot": schema(skypilot_keys.TASK)}
    for kind, table in dstack_keys.TABLES.items():
        definition = schema(table)
        properties = definition["properties"]
        assert isinstance(properties, dict)
        kinds = {"description": table.keys["type"].about, "const": kind}
        definitions[f"dstack-{kind}"] = {**definition, "properties": {**properties, "type": kinds}}
    runs = [{"$ref": f"#/$defs/dstack-{kind}"} for kind in dstack_keys.TABLES]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Podway task file",
        "description": "A SkyPilot task, or a dstack task, service or dev-environment, as `podway check` reads them.",
        "type": "object",
        "if": {"required": ["type"]},
        "then": {"oneOf": runs},
        "else": {"$ref": "#/$defs/skypilot"},
        "$defs": definitions,
    }
