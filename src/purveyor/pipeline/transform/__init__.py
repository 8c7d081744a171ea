"""The transform: LDAP records of the queue `ldif` become events with old and new objects in the queue `incoming`."""

from purveyor.pipeline.transform.mapping import Mapping
from purveyor.pipeline.transform.mapping_file import load_mapping, parse_mapping
from purveyor.pipeline.transform.transform_query import TransformSettings, start_transform

__all__ = ["Mapping", "TransformSettings", "load_mapping", "parse_mapping", "start_transform"]
