"""The transform: LDAP records of the queue `ldif` become events with old and new objects in the queue `incoming`.

The package exports what needs no Spark: a source reads the mapping too. `transform_query` starts the transform.
"""

from purveyor.pipeline.transform.mapping import Mapping
from purveyor.pipeline.transform.mapping_file import load_mapping, parse_mapping

__all__ = ["Mapping", "load_mapping", "parse_mapping"]
