"""What a worker process runs: answers requests about environments until the other end of its socket closes. See `envs.workers`."""

import contextlib
import importlib
import signal
import socket
import sys
from typing import Any

from envs import registry, workers


class Server:
    """Answers one request at a time. Each method takes the header's fields and the arrays, and returns the same pair."""

    def __init__(self):
        self._env: Any = None

    def make(self, fields, arrays):
        del arrays
        name = fields['name']
        if fields['constructor']:
            module, path = fields['constructor'].split(':')
            constructor = getattr(importlib.import_module(module), path)
            if not registry.is_registered(name):  # the module may have done that when it was imported
                registry.register(name.partition(':')[0], constructor)
        self._env = registry.make(name, fields['num_envs'])
        if self._env.on_device:
            raise ValueError(f'{name!r} is a DeviceEnv: register it with on_device=True')
        return {'spec': workers.pack_spec(self._env.spec)}, {}

    def reset(self, fields, arrays):
        del fields
        return {}, workers.pack_observations(self._env.reset(arrays['seeds'], arrays['where']))

    def step(self, fields, arrays):
        del fields
        result = self._env.step(arrays['actions'], arrays['active'])
        metrics = {f'metrics/{name}': values for name, values in result.metrics.items()}
        answer = {'rewards': result.rewards, 'masks': result.masks, 'truncations': result.truncations, **metrics}
        return {}, answer | workers.pack_observations(result.observations)

    def get_state(self, fields, arrays):
        del fields, arrays
        return {}, self._env.get_state()

    def set_state(self, fields, arrays):
        del fields
        self._env.set_state(arrays)
        return {}, {}

    def render(self, fields, arrays):
        del arrays
        return {}, {'image': self._env.render(fields['slot'])}

    def generate(self, fields, arrays):
        del arrays
        from envs import generate

        part = generate.episodes(fields['name'], fields['seed'], fields['split'], fields['numbers'])
        return {'goals_reached': part.goals_reached, 'goals_set': part.goals_set}, part.arrays


def serve(channel: socket.socket) -> None:
    """Answers until the other end closes. What a request raises is sent back; the other end then closes."""
    server = Server()
    while True:
        try:
            fields, arrays = workers.receive(channel)
        except (EOFError, OSError):
            return
        try:
            header, answer = getattr(server, fields.pop('operation'))(fields, arrays)
        except Exception as error:
            header, answer = {'error': str(error) or repr(error), 'kind': type(error).__name__}, {}
        with contextlib.suppress(OSError):
            workers.send(channel, header, answer)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == '__main__':
    main()
