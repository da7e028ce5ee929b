"""The port model: the seconds and bytes of traffic, and a lower bound on the cost of any plan."""

from rvdcomm.cost.bound import LevelBound, cost_of_levels, lower_bound
from rvdcomm.cost.cuts import FlowBound, flow_bound, network_bound, wires_of_members
from rvdcomm.cost.demands import Demand, demand_boxes, demands_of, in_units
from rvdcomm.cost.ports import (
    Cost,
    PortSecs,
    StepCost,
    Traffic,
    busiest_bytes,
    busy_secs,
    farthest_level,
    joined_cost,
    num_partners,
    pipelined_secs,
    port_secs,
    step_cost,
    total_cost,
)
from rvdcomm.cost.rounds import with_rounds
from rvdcomm.cost.ticks import PortTicks

__all__ = [
    "Cost",
    "Demand",
    "FlowBound",
    "LevelBound",
    "PortSecs",
    "PortTicks",
    "StepCost",
    "Traffic",
    "busiest_bytes",
    "busy_secs",
    "cost_of_levels",
    "demand_boxes",
    "demands_of",
    "farthest_level",
    "flow_bound",
    "in_units",
    "joined_cost",
    "lower_bound",
    "network_bound",
    "num_partners",
    "pipelined_secs",
    "port_secs",
    "step_cost",
    "total_cost",
    "wires_of_members",
    "with_rounds",
]
