"""YAML in which no key may be given twice: PyYAML takes the last one and says nothing."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError


class DistinctLoader(yaml.SafeLoader):
    """Reads as ``yaml.safe_load`` does, but for mappings with a key that is there twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As the base's; here, since merged keys, which may be given again, are not there yet.

        Raises:
            ComposerError: for a key that is there twice; it says where.
        """
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return node
