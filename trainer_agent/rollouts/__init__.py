"""Generation by the engines of a group: one call that survives updates, pauses and dead engines.

:class:`~trainer_agent.rollouts.client.RolloutClient` asks, :mod:`~trainer_agent.rollouts.router`
says which engine, :mod:`~trainer_agent.rollouts.attempt` is one HTTP request to it, and
:mod:`~trainer_agent.rollouts.request` says what the next attempt asks for, and whether that goes on
exactly.
"""
