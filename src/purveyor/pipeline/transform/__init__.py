"""The transform: LDAP records of the queue `ldif` become events with old and new objects in the queue `incoming`.

A mapping can be read without Spark; the query is in `transform_query`.
"""

from purveyor.pipeline.transform.mapping import Mapping
from purveyor.pipeline.transform.mapping_file import load_mapping, parse_mapping

__all__ = ["Mapping", "load_mapping", "parse_mapping"]
