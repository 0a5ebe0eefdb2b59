"""Containers in a real engine."""

from tests.containers.fixtures import docker, docker_engine, podman, podman_engine

__all__ = ["docker", "docker_engine", "podman", "podman_engine"]
