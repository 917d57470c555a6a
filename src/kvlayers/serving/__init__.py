"""What those who serve many users need of a prefix store: sessions, events for routers, figures for Prometheus."""

from kvlayers.prefix.keys import namespace_mark
from kvlayers.serving.events import StoreEvent, key_of
from kvlayers.serving.reports import prometheus_text
from kvlayers.serving.sessions import Session

__all__ = ["Session", "StoreEvent", "key_of", "namespace_mark", "prometheus_text"]
