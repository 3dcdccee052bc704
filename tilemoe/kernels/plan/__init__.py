"""Builders of a RoutingPlan from expert ids."""
