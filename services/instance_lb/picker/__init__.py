"""Picks servers for a gateway that carries the bytes itself: an endpoint picker by Envoy's ext_proc protocol."""

from services.instance_lb.picker.server import PickerServer

__all__ = ["PickerServer"]
