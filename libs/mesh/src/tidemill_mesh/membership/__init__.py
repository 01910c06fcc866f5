"""Who is in the mesh: registration under a lease, a watched view of all instances, and leader election, over etcd."""

from tidemill_mesh.membership.election import Election
from tidemill_mesh.membership.registration import Membership, Registration
from tidemill_mesh.membership.view import InstanceView

__all__ = ["Election", "InstanceView", "Membership", "Registration"]
