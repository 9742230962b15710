"""Generates tokens with the engines of a group, despite updates, pauses and dead engines.

:class:`~trainer_agent._rollouts.client.RolloutClient` takes requests,
:mod:`~trainer_agent._rollouts.router` chooses engines, :mod:`~trainer_agent._rollouts.attempt`
sends one HTTP request. After an interruption, :mod:`~trainer_agent._rollouts.request` makes the
body of the next attempt, and decides whether that attempt continues exactly.
"""
