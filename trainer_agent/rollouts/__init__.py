"""Generates with the engines of a group, despite updates, pauses and dead engines.

:class:`~trainer_agent.rollouts.client.RolloutClient` takes requests,
:mod:`~trainer_agent.rollouts.router` chooses engines, :mod:`~trainer_agent.rollouts.attempt` sends
one HTTP request, and :mod:`~trainer_agent.rollouts.request` makes the next attempt's body and says
whether it continues exactly.
"""
