"""Writes configs/schemas/STAGE.json, the JSON schema of each stage's config, from the dataclasses; run by `make schemas`.

Editors read them; so do `alignment STAGE --help` and `alignment schema STAGE`, which then load no torch. An editor with
the YAML language server checks a config whose first line is `# yaml-language-server: $schema=FILE`, where FILE is one of
these, or what `alignment schema STAGE` printed.
"""

from alignment.config.load import packaged_folder
from alignment.config.schema import schema_of
from alignment.files import write_json
from alignment.pipeline.stages import STAGES, find_stage

if __name__ == "__main__":
    for stage in STAGES:
        write_json(packaged_folder("configs") / "schemas" / f"{stage}.json", schema_of(find_stage(stage)[0]))
