"""Nodes of Ray in hosts."""


def start_ray(host, head=None, cpus=1, env=None):
    """Starts a node of Ray in a host, of a new cluster or of that of `head`, and returns when it is up."""
    place = [f"--address={head.address}:6379"] if head else ["--head", "--port=6379", "--include-dashboard=false"]
    options = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    done = host.run("ray", "start", *place, *options, "--disable-usage-stats", env=env)
    if done.returncode:
        raise RuntimeError(f"ray start in {host.name}: {done.stdout}{done.stderr}")
