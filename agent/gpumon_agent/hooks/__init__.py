"""Hooks into torch that find models, phases and step boundaries."""
