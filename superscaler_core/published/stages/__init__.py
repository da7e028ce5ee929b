"""How a model is cut into pipeline stages: published planners over one stage problem."""

from superscaler_core.published.stages.alpa import alpa, alpa_stages
from superscaler_core.published.stages.candidates import Candidates
from superscaler_core.published.stages.cut import PlacedStage, StageCut
from superscaler_core.published.stages.dapple import dapple
from superscaler_core.published.stages.degrees import Degrees
from superscaler_core.published.stages.fill import fill
from superscaler_core.published.stages.galvatron import galvatron
from superscaler_core.published.stages.pipedream import pipedream, pipedream_hierarchical
from superscaler_core.published.stages.piper import piper
from superscaler_core.published.stages.plan_stages import STAGE_PLANNERS, plan_stages
from superscaler_core.published.stages.pricing import price_stages
from superscaler_core.published.stages.problem import Layer, LayerCost, StageProblem
from superscaler_core.published.stages.stages import stages
from superscaler_core.published.stages.tarnawski import tarnawski, tarnawski_scattered

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
