"""How a model is cut into pipeline stages: published planners over one stage problem."""

from superscaler_core.planners.stages.alpa import alpa, alpa_stages
from superscaler_core.planners.stages.candidates import Candidates
from superscaler_core.planners.stages.cut import PlacedStage, StageCut
from superscaler_core.planners.stages.dapple import dapple
from superscaler_core.planners.stages.degrees import Degrees
from superscaler_core.planners.stages.fill import fill
from superscaler_core.planners.stages.galvatron import galvatron
from superscaler_core.planners.stages.pipedream import pipedream, pipedream_hierarchical
from superscaler_core.planners.stages.piper import piper
from superscaler_core.planners.stages.plan_stages import STAGE_PLANNERS, plan_stages
from superscaler_core.planners.stages.pricing import price_stages
from superscaler_core.planners.stages.problem import Layer, LayerCost, StageProblem
from superscaler_core.planners.stages.stages import stages
from superscaler_core.planners.stages.tarnawski import tarnawski, tarnawski_scattered

__all__ = [
    "STAGE_PLANNERS",
    "Candidates",
    "Degrees",
    "Layer",
    "LayerCost",
    "PlacedStage",
    "StageCut",
    "StageProblem",
    "alpa",
    "alpa_stages",
    "dapple",
    "fill",
    "galvatron",
    "pipedream",
    "pipedream_hierarchical",
    "piper",
    "plan_stages",
    "price_stages",
    "stages",
    "tarnawski",
    "tarnawski_scattered",
]
